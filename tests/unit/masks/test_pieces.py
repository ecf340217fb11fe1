"""Decoding goes in pieces; where they are cut, in the middle of a row too, changes nothing."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sideband.masks import csr_bits, others_arrays, others_rice, rice, starts
from sideband.masks.errors import MalformedMaskBlock, TokenNotOfRow
from sideband.masks.rows import MaskRows
from sideband.payload.encodings import MASK_ENCODINGS
from tests.unit.masks.support import Kept, kept_sets, lists, mask_rows
from tests.unit.masks.ways import ARRAYS, taking


@contextmanager
def pieces_of(values: int, piece_bytes: int) -> Iterator[None]:
    with ExitStack() as stack:
        for module in (csr_bits, others_arrays, others_rice, rice, starts):
            stack.enter_context(patch.object(module, "VALUES_AT_ONCE", values))
        stack.enter_context(patch.object(others_arrays, "_PIECE_BYTES", piece_bytes))
        stack.enter_context(taking(ARRAYS))
        yield


@pytest.mark.parametrize("name", MASK_ENCODINGS)
@given(data=st.data(), vocab_size=st.sampled_from([2, 50, 300, 1000, 151_936]))
def test_pieces_of_any_size_give_the_same_rows_and_refusals(
    name: str, data: st.DataObject, vocab_size: int
) -> None:
    kept = [row for row in data.draw(kept_sets(vocab_size)) if row] or [[vocab_size - 1]]
    if vocab_size >= 300 and data.draw(st.booleans()):
        kept.append(list(range(data.draw(st.integers(255, 299)))))  # over many pieces
    sampled = np.array([data.draw(st.sampled_from(row)) for row in kept], np.int32)
    parts = MASK_ENCODINGS[name].encode_block(mask_rows(kept), sampled, vocab_size)
    stored = bytearray(b"".join(parts))
    for _ in range(data.draw(st.integers(0, 2))):
        stored[data.draw(st.integers(0, len(stored) - 1))] = data.draw(st.integers(0, 255))
    first = data.draw(st.integers(0, len(kept) - 1))
    last = data.draw(st.integers(first + 1, len(kept)))
    values, piece_bytes = data.draw(st.sampled_from([8, 16, 64])), data.draw(st.integers(1, 9))

    def outcome() -> Kept | str:
        try:
            found: MaskRows = MASK_ENCODINGS[name].decode_rows(
                memoryview(stored),
                len(kept),
                vocab_size,
                first=first,
                sampled_N=sampled[first:last],
            )
        except TokenNotOfRow as exc:
            return str(exc)
        except MalformedMaskBlock:  # what is named first may differ
            return "malformed"
        return lists(found)

    with taking(ARRAYS):
        expected = outcome()
    with pieces_of(values, piece_bytes):
        assert outcome() == expected
