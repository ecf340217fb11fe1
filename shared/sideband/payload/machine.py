"""What the loop of ``sideband.payload.copying`` calls once it is compiled. Importing imports numba.

Hashing (xxh3-64, seed 0, as ``layout.checksum``) waits for the processor, copying to where rows
shall lie for memory: by turns, a kilobyte each, both take as long as the copy alone. The copy goes
past the caches, which would first fetch each line from memory only to have it overwritten. Numba
keeps a compiled loop until the loop's own file changes: after a change here touch that file too.

Addresses are integers. Nothing checks bounds: the arrays must hold what is asked for.
"""

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.cgutils import global_constant, raw_memcpy
from numba.extending import intrinsic

_STRIPE_BYTES: Final = 64  # eight lanes, one vector, and a line of the caches
_UNIT_BYTES: Final = 1024  # stripes until the lanes are scrambled
_SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME32_1, _PRIME32_2, _PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME64_1, _PRIME64_2, _PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_PRIME64_4, _PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_BEGIN: Final = tuple(
    np.uint64(word)
    for word in (
        *(_PRIME32_3, _PRIME64_1, _PRIME64_2, _PRIME64_3),
        *(_PRIME64_4, _PRIME32_2, _PRIME64_5, _PRIME32_1),
    )
)
_FOLD_SECRET: Final = tuple(np.frombuffer(_SECRET, np.uint64, 8, offset=11))
_SCRAMBLE_AT: Final = len(_SECRET) - _STRIPE_BYTES
_LAST_STRIPE_AT: Final = _SCRAMBLE_AT - 7
_LENGTH_FACTOR: Final = np.uint64(_PRIME64_1)
_MIX_FACTOR: Final = np.uint64(0x165667919E3779F9)

_WORD: Final = ir.IntType(64)
_VECTOR: Final = ir.VectorType(_WORD, 8)
_NEIGHBOURS: Final = ir.Constant(ir.VectorType(ir.IntType(32), 8), [1, 0, 3, 2, 5, 4, 7, 6])
_ADDRESS: Final = types.int64
_pread: Final = types.ExternalFunction(
    "pread", types.intp(types.int32, types.uintp, types.uintp, types.int64)
)


def _make_absorb_unit(_: Any, lanes: Any, source: Any) -> Any:
    """Take the kilobyte at ``source`` into the lanes, which lie at an address too."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        into, source = args
        mixed = _load(builder, into)
        for start in range(0, _UNIT_BYTES, _STRIPE_BYTES):
            words = _load(builder, _moved(builder, source, start))
            mixed = _mixed(builder, mixed, words, _secret_words(start // 8))
        mixed = builder.xor(mixed, builder.lshr(mixed, _all(47)))
        mixed = builder.mul(builder.xor(mixed, _secret_words(_SCRAMBLE_AT)), _all(_PRIME32_1))
        _store(builder, mixed, into)
        return context.get_dummy_value()

    return types.void(_ADDRESS, _ADDRESS), generate


def _make_absorb_stripe(_: Any, lanes: Any, source: Any, secret_at: Any) -> Any:
    """Take one stripe into the lanes, with the secret from byte ``secret_at`` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        into, source, secret_at = args
        kept = ir.Constant(ir.ArrayType(ir.IntType(8), len(_SECRET)), bytearray(_SECRET))
        secret = builder.ptrtoint(global_constant(builder, "xxh3_secret", kept), _WORD)
        key = _load(builder, builder.add(secret, secret_at))
        words = _load(builder, source)
        _store(builder, _mixed(builder, _load(builder, into), words, key), into)
        return context.get_dummy_value()

    return types.void(_ADDRESS, _ADDRESS, types.int64), generate


def _make_stream_unit(_: Any, target: Any, source: Any) -> Any:
    """Copy a kilobyte past the caches to ``target``, which is aligned to their lines."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target, source = args
        is_streamed = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        for start in range(0, _UNIT_BYTES, _STRIPE_BYTES):
            words = _load(builder, _moved(builder, source, start))
            stored = _store(builder, words, _moved(builder, target, start), align=_STRIPE_BYTES)
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


def _make_folded(_: Any, one: Any, other: Any) -> Any:
    """The two halves of the product of 128 bits, one over the other."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(word, wide) for word in args))
        high = builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), _WORD)
        return builder.xor(builder.trunc(product, _WORD), high)

    return types.uint64(types.uint64, types.uint64), generate


def _mixed(builder: Any, lanes: Any, words: Any, key: Any) -> Any:
    """The lanes after a stripe: each adds its neighbour's word and its own halves' product."""
    keyed = builder.xor(words, key)
    halves = builder.and_(keyed, _all((1 << 32) - 1)), builder.lshr(keyed, _all(32))
    swapped = builder.shuffle_vector(words, words, _NEIGHBOURS)
    return builder.add(builder.add(lanes, swapped), builder.mul(*halves))


def _all(word: int) -> Any:
    return ir.Constant(_VECTOR, [word] * 8)


def _secret_words(at: int) -> Any:
    return ir.Constant(_VECTOR, np.frombuffer(_SECRET, np.uint64, 8, offset=at).tolist())


def _moved(builder: Any, address: Any, bytes_on: int) -> Any:
    return builder.add(address, ir.Constant(_WORD, bytes_on))


def _load(builder: Any, address: Any) -> Any:
    loaded = builder.load(builder.inttoptr(address, _VECTOR.as_pointer()))
    loaded.align = 1
    return loaded


def _store(builder: Any, words: Any, address: Any, *, align: int = 1) -> Any:
    stored = builder.store(words, builder.inttoptr(address, _VECTOR.as_pointer()))
    stored.align = align
    return stored


_absorb_unit: Final = intrinsic(_make_absorb_unit)
_absorb_stripe: Final = intrinsic(_make_absorb_stripe)
_stream_unit: Final = intrinsic(_make_stream_unit)
_copy: Final = intrinsic(_make_copy)
_folded: Final = intrinsic(_make_folded)
_fence: Final = intrinsic(_make_fence)


def read_into(fd: Any, block: Any, offset: Any) -> Any:
    """As in ``copying``."""
    return _pread(np.int32(fd), block.ctypes.data, len(block), offset)


def copy_hashed(block: Any, skipped: Any, out: Any) -> Any:
    """As in ``copying``, of a block of more than 240 bytes: fewer are hashed in other ways."""
    lanes = np.array(_BEGIN)
    into, source, size = np.int64(lanes.ctypes.data), np.int64(block.ctypes.data), len(block)
    target = np.int64(out.ctypes.data) - skipped  # where the byte at ``source`` would go
    end = skipped + len(out)
    begin = at = min(skipped + -(target + skipped) % _STRIPE_BYTES, end)
    unit_stop = size - 1 - (size - 1) % _UNIT_BYTES  # the last stripe is hashed apart
    for start in range(0, unit_stop, _UNIT_BYTES):
        _absorb_unit(into, source + start)
        if at + _UNIT_BYTES <= end:
            _stream_unit(target + at, source + at)
            at += _UNIT_BYTES
    _copy(target + skipped, source + skipped, begin - skipped)
    _copy(target + at, source + at, end - at)
    for number in range((size - 1 - unit_stop) // _STRIPE_BYTES):
        _absorb_stripe(into, source + unit_stop + number * _STRIPE_BYTES, number * 8)
    _absorb_stripe(into, source + size - _STRIPE_BYTES, _LAST_STRIPE_AT)
    found = np.uint64(size) * _LENGTH_FACTOR
    for lane in range(0, 8, 2):
        one, other = lanes[lane] ^ _FOLD_SECRET[lane], lanes[lane + 1] ^ _FOLD_SECRET[lane + 1]
        found += _folded(one, other)
    found = (found ^ (found >> np.uint64(37))) * _MIX_FACTOR
    return found ^ (found >> np.uint64(32))


def settle() -> None:
    """As in ``copying``."""
    _fence()
