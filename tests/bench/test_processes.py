"""Processes that a row starts."""

import os
import subprocess
import sys
import time

import pytest

from bench.http.processes import processor_s


def test_a_processs_time_is_told_in_less_than_a_hundredth_of_a_second() -> None:
    before_s = processor_s(os.getpid())
    sum(range(10_000))
    assert processor_s(os.getpid()) - before_s > 0
    assert processor_s(os.getpid()) == pytest.approx(time.process_time(), abs=1)


def test_the_time_of_a_process_that_is_gone_is_an_error() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(30)
    with pytest.raises(OSError, match="Invalid argument"):
        processor_s(gone.pid)
