"""Base64 read in parts is base64 read whole, and nothing else is taken."""

import base64
import re
from collections.abc import Iterator
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sideband.engines import base64_text
from sideband.engines.base64_text import decode_base64

ONE: Final = "[A-Za-z0-9+/]"


@pytest.fixture(scope="module", autouse=True)
def short_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base64_text, "SLICE_CHARACTERS", 8)
        yield


def whole(text: str) -> bytes | None:
    # Python takes more padding than there must be.
    is_base64 = re.fullmatch(rf"({ONE}{{4}})*({ONE}{{2}}==|{ONE}{{3}}=)?", text)
    return base64.b64decode(text, validate=True) if is_base64 else None


def in_parts(text: str) -> bytes | None:
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
