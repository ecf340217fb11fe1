"""Loops that numba compiles where it is installed (the extra ``sideband[fast]``).

For what numpy cannot do by whole arrays without many passes. Each loop is ordinary Python over
arrays, and whoever calls one has a numpy way beside it that gives the same results: without numba
nothing changes but the time. Importing numba and compiling take longer than small work is worth, so
a process begins with numpy and compiles a loop once it has done so much that it would have paid;
``compile_loops`` does it at once. What was compiled is kept beside the package for later processes,
where that can be written and read.

A compiled loop checks no bounds. The caller must have shown that no input can lead it out of its
arrays; it runs without Python's lock.
"""

import os
import threading
from collections.abc import Callable
from functools import cache
from pickle import UnpicklingError
from typing import Any, ClassVar, Final, Generic, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
_COMPILING: Final = threading.RLock()
# A process forked meanwhile would wait for a thread that it does not have.
os.register_at_fork(
    before=_COMPILING.acquire,
    after_in_parent=_COMPILING.release,
    after_in_child=_COMPILING.release,
)
# No folder to keep anything in; one that is full; something kept that was cut short.
_KEEPING_ERRORS: Final = (RuntimeError, OSError, EOFError, UnpicklingError)


class Loop(Generic[F]):
    """A function of arrays and numbers. ``signature``: its types as numba writes them.

    ``worth``: from how many items on, in one process, compiling would have paid. ``teach``: called
    once before it is compiled, to give numba what the function calls.
    """

    _all: ClassVar[list["Loop[Any]"]] = []

    def __init__(
        self,
        function: F,
        signature: str,
        *,
        worth: int,
        teach: Callable[[], None] = lambda: None,
    ) -> None:
        self.function, self._signature, self._worth = function, signature, worth
        self._teach = teach
        self._items = 0  # roughly: threads may lose some of them
        self._is_compiled = False
        self._compiled: F | None = None
        Loop._all.append(self)

    def for_items(self, count: int) -> F | None:
        """The compiled function for so many items; None where numpy does it."""
        if not self._is_compiled:
            self._items += count
            if self._items < self._worth:
                return None
            self.compile()
        return self._compiled

    def compile(self) -> None:
        """Compile it now, if numba is installed."""
        with _COMPILING:
            if not self._is_compiled:
                self._compiled = _compile(self.function, self._signature, self._teach)
                self._is_compiled = True


def compile_loops() -> bool:
    """Compile all loops now, a second's work the first time. Whether numba is installed."""
    for loop in Loop._all:
        loop.compile()
    return all(loop._compiled is not None for loop in Loop._all)


def trailing_zeros(word: Any) -> int:
    """Zero bits below the lowest one of a 64-bit word, which must not be 0."""
    number = int(word)
    return (number & -number).bit_length() - 1


def _compile(function: F, signature: str, teach: Callable[[], None]) -> F | None:
    try:
        from numba import njit

        _teach_trailing_zeros()
        teach()
    except ImportError:  # not installed, or not for this numpy
        return None
    try:
        compiled: F = njit(signature, nogil=True, cache=True)(function)
    except _KEEPING_ERRORS:
        compiled = njit(signature, nogil=True)(function)
    return compiled


@cache
def _teach_trailing_zeros() -> None:
    """Give compiled loops the machine's own instruction for ``trailing_zeros``."""
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic, overload

    @intrinsic  # type: ignore[untyped-decorator]  # numba has no types
    def count(typing_context: Any, word: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

        return types.int64(types.uint64), generate

    @overload(trailing_zeros, inline="always")  # type: ignore[untyped-decorator]  # the same
    def _(word: Any) -> Any:
        def zeros(word: Any) -> Any:
            return count(word)

        return zeros
