"""Base64 read in parts is base64 read whole, and nothing else is taken."""

import base64
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sideband.engines import base64_text
from sideband.engines.base64_text import decode_base64, encode_base64
from sideband.engines.long_text import LongText, slices_of

ONE: Final = "[A-Za-z0-9+/]"


@pytest.fixture(scope="module", autouse=True)
def short_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base64_text, "SLICE_CHARACTERS", 8)
        patch.setattr(base64_text, "SLICE_BYTES", 6)
        yield


def whole(text: str) -> bytes | None:
    # Python takes more padding than there must be.
    is_base64 = re.fullmatch(rf"({ONE}{{4}})*({ONE}{{2}}==|{ONE}{{3}}=)?", text)
    return base64.b64decode(text, validate=True) if is_base64 else None


def in_parts(text: str | LongText) -> bytes | None:
    try:
        data = decode_base64(text)
    except ValueError:
        return None
    assert data.readonly
    return bytes(data)


@given(st.binary(max_size=60))
def test_what_was_encoded_comes_back(data: bytes) -> None:
    assert in_parts(base64.b64encode(data).decode()) == data


@given(st.text("Ab+/=", max_size=40) | st.text("Ab=-é \n", max_size=20))
def test_the_same_is_refused(text: str) -> None:
    assert in_parts(text) == whole(text)


@pytest.mark.parametrize(
    "text",
    [
        "AAAA" * 2 + "AA==" + "AAAA",
        "AAAAAA==" * 2,
        "AAAAAAA",
        "=",
        "AAAA=",
        "AAAAAAAA=",
        "AAAA====",
    ],
)
def test_padding_stands_at_the_end(text: str) -> None:
    assert in_parts(text) is None


def cut_anywhere(data: st.DataObject, text: bytes) -> LongText:
    edges = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    return LongText(tuple(text[a:b] for a, b in pairwise([0, *sorted(edges), len(text)])))


@given(st.text("Ab+/=", max_size=40), st.data())
def test_a_text_in_parts_is_read_as_the_whole(text: str, data: st.DataObject) -> None:
    parts = cut_anywhere(data, text.encode())
    assert len(parts) == len(text)
    assert in_parts(parts) == in_parts(text)


@given(st.binary(max_size=40), st.integers(1, 9), st.data())
def test_slices_are_whole_but_the_last(text: bytes, size: int, data: st.DataObject) -> None:
    slices = list(slices_of(cut_anywhere(data, text), size))
    assert slices == [text[at : at + size] for at in range(0, len(text), size)]


@given(st.binary(max_size=6), st.binary(max_size=40))
def test_bytes_are_encoded_in_parts_as_whole(head: bytes, rows: bytes) -> None:
    text = encode_base64(head, memoryview(rows))
    assert b"".join(text.parts) == base64.b64encode(head + rows)
    assert max(map(len, text.parts)) <= 8
