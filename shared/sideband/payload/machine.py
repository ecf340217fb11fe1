"""What the loop of ``sideband.payload.copying`` calls once it is compiled. Importing imports numba.

The hash is the xxhash library's own, called where its module keeps it. Hashing waits for the
processor, a copy to where rows shall lie for memory: by turns, a few kilobytes each, both take
little longer than the copy alone. The copy goes past the caches, which would first fetch each line
from memory only to have it overwritten. Numba keeps a compiled loop until the loop's own file
changes: after a change here touch that file too.

Addresses are integers. Nothing checks bounds: the arrays must hold what is asked for. Raises
ImportError where the library does not show its functions; the loop is then not compiled.
"""

import ctypes
from importlib import import_module
from typing import Any, Final

import numpy as np
from llvmlite import ir
from llvmlite.binding import add_symbol
from numba import types
from numba.core.cgutils import raw_memcpy
from numba.extending import intrinsic

_TURN_BYTES: Final = 4096  # half and twice of it take up to 2 % longer
_LINE_BYTES: Final = 64
_UNIT_BYTES: Final = 1024  # copied by one run of instructions

_ADDRESS: Final = types.int64
_LIBRARY: Final = ctypes.CDLL(import_module("xxhash._xxhash").__file__)


def _of_library(name: str, signature: Any) -> Any:
    """A function of the library, in the variant that chooses the processor's best vectors."""
    for variant in (f"{name}_dispatch", name):
        function = getattr(_LIBRARY, variant, None)
        if function is not None:
            add_symbol(f"sideband_{name}", ctypes.cast(function, ctypes.c_void_p).value)
            return types.ExternalFunction(f"sideband_{name}", signature)
    raise ImportError(f"xxhash shows no {name}")


_hash: Final = _of_library("XXH3_64bits", types.uint64(_ADDRESS, _ADDRESS))
_create: Final = _of_library("XXH3_createState", _ADDRESS())
_reset: Final = _of_library("XXH3_64bits_reset", types.int32(_ADDRESS))
_update: Final = _of_library("XXH3_64bits_update", types.int32(_ADDRESS, _ADDRESS, _ADDRESS))
_digest: Final = _of_library("XXH3_64bits_digest", types.uint64(_ADDRESS))
_free: Final = _of_library("XXH3_freeState", types.int32(_ADDRESS))
_pread: Final = types.ExternalFunction(
    "pread", types.int64(types.int32, _ADDRESS, _ADDRESS, types.int64)
)


def _make_stream_unit(_: Any, target: Any, source: Any) -> Any:
    """Copy a kilobyte past the caches to ``target``, which is aligned to their lines."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        line = ir.VectorType(word, _LINE_BYTES // 8).as_pointer()
        is_streamed = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        for start in range(0, _UNIT_BYTES, _LINE_BYTES):
            moved = (builder.add(address, ir.Constant(word, start)) for address in args)
            target, source = (builder.inttoptr(address, line) for address in moved)
            loaded = builder.load(source)
            loaded.align = 1
            stored = builder.store(loaded, target)
            stored.align = _LINE_BYTES
            stored.set_metadata("nontemporal", is_streamed)
        return context.get_dummy_value()

    return types.void(_ADDRESS, _ADDRESS), generate


def _make_copy(_: Any, target: Any, source: Any, size: Any) -> Any:
    """Copy so many bytes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        target, source = (builder.inttoptr(address, byte) for address in args[:2])
        raw_memcpy(builder, target, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(_ADDRESS, _ADDRESS, types.int64), generate


def _make_fence(_: Any) -> Any:
    """Streamed bytes are in memory for every processor before anything that follows."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


_stream_unit: Final = intrinsic(_make_stream_unit)
_copy: Final = intrinsic(_make_copy)
_fence: Final = intrinsic(_make_fence)


def read_into(fd: Any, block: Any, offset: Any) -> Any:
    """As in ``copying``."""
    return _pread(np.int32(fd), np.int64(block.ctypes.data), len(block), offset)


def copy_hashed(block: Any, skipped: Any, out: Any) -> Any:
    """As in ``copying``."""
    source, size = np.int64(block.ctypes.data), len(block)
    target = np.int64(out.ctypes.data) - skipped  # where the byte at ``source`` would go
    end = skipped + len(out)
    begin = at = min(skipped + -(target + skipped) % _LINE_BYTES, end)
    state = _create()
    if state == 0:  # there is no memory for one
        _copy(target + skipped, source + skipped, len(out))
        return _hash(source, size)
    _reset(state)
    hashed = 0
    while at + _UNIT_BYTES <= end:
        turn = min(_TURN_BYTES, size - hashed)
        _update(state, source + hashed, turn)
        hashed += turn
        turn_end = min(at + _TURN_BYTES, end)
        while at + _UNIT_BYTES <= turn_end:
            _stream_unit(target + at, source + at)
            at += _UNIT_BYTES
    _update(state, source + hashed, size - hashed)
    _copy(target + skipped, source + skipped, begin - skipped)
    _copy(target + at, source + at, end - at)
    found = _digest(state)
    _free(state)
    return found


def settle() -> None:
    """As in ``copying``."""
    _fence()
