"""Loops that numba compiles: only when they are called, only where it is, and never in the way."""

import os
import subprocess
import sys
from errno import ENOSPC
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sideband.compiled import Loop, compile_loops, trailing_zeros

SHARED = Path(__file__).parents[2] / "shared"


def double(values: Any) -> int:
    for index in range(len(values)):
        values[index] *= 2
    return len(values)


def test_importing_the_library_imports_no_compiler() -> None:
    code = "import sys, sideband, sideband.payload; print({'numba', 'llvmlite'} & set(sys.modules))"
    said = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(SHARED)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert said.stdout.strip() == "set()"


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop[Any]:
    monkeypatch.setattr(Loop, "_all", [])
    return Loop[Any](double, "int64(int64[::1])", worth=10)


def test_without_numba_numpy_does_everything(
    monkeypatch: pytest.MonkeyPatch, loop: Loop[Any]
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    assert loop.for_items(1000) is None
    assert loop.for_items(1000) is None
    assert not compile_loops()


def test_a_loop_is_compiled_when_it_would_have_paid_and_once(loop: Loop[Any]) -> None:
    pytest.importorskip("numba")
    assert loop.for_items(9) is None
    compiled = loop.for_items(1)
    assert compiled is loop.for_items(1)
    values = np.arange(3)
    assert compiled is not None
    assert compiled(values) == 3
    assert values.tolist() == [0, 2, 4]


def test_a_loop_is_taught_what_it_calls_right_before_it_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr(Loop, "_all", [])
    taught: list[str] = []
    loop = Loop[Any](double, "int64(int64[::1])", worth=10, teach=lambda: taught.append("double"))
    loop.for_items(9)
    assert taught == []
    loop.for_items(1)
    loop.for_items(1)
    assert taught == ["double"]


def test_what_a_loop_cannot_be_taught_numpy_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loop, "_all", [])

    def teach() -> None:
        raise ImportError("a library without what it needs")

    loop = Loop[Any](double, "int64(int64[::1])", worth=1, teach=teach)
    assert loop.for_items(1) is None
    assert not compile_loops()


def test_who_wants_it_at_once_gets_it(loop: Loop[Any]) -> None:
    pytest.importorskip("numba")
    assert compile_loops()
    assert loop.for_items(1) is not None


@pytest.mark.parametrize(
    "error",
    [RuntimeError("cannot cache function: no locator available"), OSError(ENOSPC, "no space left")],
)
def test_a_loop_is_compiled_where_nothing_can_be_kept(
    monkeypatch: pytest.MonkeyPatch, loop: Loop[Any], error: Exception
) -> None:
    """A read-only package and no home folder, or a full one."""
    numba = pytest.importorskip("numba")
    real = numba.njit

    def njit(*args: Any, **options: Any) -> Any:
        if options.get("cache"):
            raise error
        return real(*args, **options)

    monkeypatch.setattr(numba, "njit", njit)
    compiled = loop.for_items(10)
    assert compiled is not None
    assert compiled(np.zeros(2, np.int64)) == 2


@pytest.mark.parametrize("left", [b"", bytes(64), None], ids=["nothing", "zeros", "half"])
@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
def test_what_was_kept_and_cannot_be_read_is_compiled_anew(
    tmp_path: Path, suffix: str, left: bytes | None
) -> None:
    """As a machine that lost its power leaves it."""
    pytest.importorskip("numba")
    assert kept_and_compiled(tmp_path) == "6"
    found = list(tmp_path.rglob(f"*{suffix}"))
    assert found
    for file in found:
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2] if left is None else left)
    assert kept_and_compiled(tmp_path) == "6"


def kept_and_compiled(folder: Path) -> str:
    """What a loop gives in a process of its own, which keeps it in ``folder``."""
    code = """
import numpy as np
from sideband.compiled import Loop
from tests.unit.test_compiled import double

values = np.arange(3)
loop = Loop(double, "int64(int64[::1])", worth=1)
loop.for_items(1)(values)
print(values.sum())
"""
    return printed(code, NUMBA_CACHE_DIR=str(folder))


def test_a_process_forked_while_another_thread_compiles_can_compile() -> None:
    pytest.importorskip("numba")
    code = """
import os, signal, threading
from sideband.compiled import Loop
from tests.unit.test_compiled import double

begun, forking = threading.Event(), threading.Event()

def teach():
    begun.set()
    forking.wait()

loop = Loop(double, "int64(int64[::1])", worth=1, teach=teach)
thread = threading.Thread(target=loop.compile)
thread.start()
begun.wait()
os.register_at_fork(before=forking.set)  # called before those that were registered earlier
if pid := os.fork():
    thread.join()
    print(os.waitpid(pid, 0)[1])
else:
    signal.alarm(20)
    loop.compile()
    os._exit(0)
"""
    assert printed(code) == "0"


def printed(code: str, **environment: str) -> str:
    said = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": f"{SHARED}:{SHARED.parent}", **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return said.stdout.strip()


@given(st.integers(0, 63), st.integers(0, (1 << 64) - 1))
def test_trailing_zeros_are_those_below_the_lowest_one(place: int, above: int) -> None:
    word = ((above << place + 1) | 1 << place) & ((1 << 64) - 1)
    assert trailing_zeros(np.uint64(word)) == place
