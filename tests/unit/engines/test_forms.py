"""Inline rows in every form that servers send: one array comes out, or a refusal by name."""

import base64
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sideband.engines.forms import RoutingValue, decode_routing, routing_size_bytes, routing_text
from sideband.engines.inline import choice_payload, encode_npy_base64
from sideband.engines.long_text import LongText
from sideband.engines.npy import InvalidInlineRouting, decode_npy_base64
from sideband.model import ModelShape
from sideband.routing.rows import RowArray

SHAPES = st.tuples(st.integers(0, 5), st.integers(1, 3), st.integers(1, 4))
ROWS: st.SearchStrategy[RowArray] = st.one_of(arrays(np.uint8, SHAPES), arrays(np.uint16, SHAPES))
MODEL = ModelShape(num_layers=2, layer_ids=(0, 1), top_k=2, id_space=8, vocab_size=16)
BYTES_MAX = 1 << 12


def as_object(rows: RowArray, **members: Any) -> dict[str, Any]:
    return {
        "data": base64.b64encode(rows.tobytes()).decode(),
        "shape": list(rows.shape),
        "dtype": rows.dtype.name,
        **members,
    }


@given(ROWS, st.integers(0, 100))
def test_every_form_of_the_same_rows_reads_alike(rows: RowArray, start: int) -> None:
    forms: list[tuple[RoutingValue, int | None]] = [
        (encode_npy_base64(rows), None),
        (LongText((b"", encode_npy_base64(rows).encode())), None),
        (as_object(rows), None),
        (as_object(rows, data=LongText((as_object(rows)["data"].encode(),))), None),
        (as_object(rows, start=start), start),
        (rows, None),
    ]
    for value, declared in forms:
        found, said = decode_routing(value, bytes_max=BYTES_MAX)
        assert said == declared
        assert found.dtype == rows.dtype
        np.testing.assert_array_equal(found, rows)
        text = routing_text(value, found)
        np.testing.assert_array_equal(decode_npy_base64(text, bytes_max=BYTES_MAX), rows)
        assert routing_size_bytes(value) >= rows.nbytes
    assert routing_size_bytes(None) == 0


GOOD = as_object(np.zeros((2, 1, 2), np.uint8), start=3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": "int32"}, "dtype"),
        ({"dtype": None}, "dtype"),
        ({"dtype": ["uint8"]}, "dtype"),
        ({"shape": None}, "shape"),
        ({"shape": [2, 2]}, "shape"),
        ({"shape": [2, -1, 2]}, "shape"),
        ({"shape": [2, True, 2]}, "shape"),
        ({"shape": [1 << 40, 1, 2]}, "shape"),
        ({"shape": [4000, 1, 2]}, "must have data of 8000 bytes"),
        ({"shape": [1, 1, 2]}, "must have data of 2 bytes"),
        ({"data": None}, "must have data"),
        ({"data": "AAAA!A=="}, "base64"),
        ({"data": "AAAé" + "AA=="}, "base64"),
        ({"data": "AAAAAAA="}, "5 bytes"),
        ({"start": -1}, "start"),
        ({"start": 1.5}, "start"),
        ({"start": True}, "start"),
    ],
)
def test_an_object_that_cannot_be_rows_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInlineRouting, match=said):
        decode_routing({**GOOD, **change}, bytes_max=BYTES_MAX)


def test_a_declared_start_decides_and_must_fit() -> None:
    rows = np.tile(np.array([0, 1], np.uint8), (2, 2, 1))  # 3 + 2 tokens: rows end at 4

    def payload(start: int) -> Any:
        return choice_payload(
            as_object(rows, start=start),
            None,
            layer_ids=None,
            prompt_tokens=3,
            completion_token_ids=[1, 2],
            prompt_start=0,
            model=MODEL,
        )

    assert payload(2).routing.pos == 2
    with pytest.raises(InvalidInlineRouting, match="2 rows"):
        payload(1)
