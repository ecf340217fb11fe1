"""A process that settled its memory takes freed blocks again instead of faulting new ones in."""

import ctypes
import subprocess
import sys

import pytest

CODE = """
import gc, resource
from services.kit.memory import settle

def faults():
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        [bytes(200_000) for _ in range(8)]  # more at once than what glibc keeps by itself
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin

before = faults()
settle()
faults()
print(before, faults(), gc.get_freeze_count())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
def test_settling_saves_page_faults() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=15, check=True
    )
    before, after, frozen = map(int, done.stdout.split())
    assert frozen > 0
    assert after < before / 10
