"""Reading only a part of large JSON says the same as reading all of it."""

from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.inference_proxy.limits import TOKEN_ID_MAX
from services.inference_proxy.raw import RAW_BYTES_MIN, parsed_answer, split_prompt

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e300, 1e300) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(st.integers(0, TOKEN_ID_MAX), min_size=1), st.dictionaries(st.text(), JSON))
def test_a_prompt_is_read_as_the_whole_parser_reads_it(
    tokens: list[int], others: dict[str, Any]
) -> None:
    body = {**others, "token_ids": tokens}
    found = split_prompt(orjson.dumps(body))
    assert found is not None
    assert found[1].tolist() == tokens
    assert orjson.loads(msgspec.json.encode(found[0])) == body


@given(st.lists(JSON, min_size=1) | JSON)
def test_a_prompt_that_is_none_is_left_to_the_whole_parser(value: Any) -> None:
    found = split_prompt(orjson.dumps({"token_ids": value}))
    if found is not None:
        assert all(type(token) is int and 0 <= token <= TOKEN_ID_MAX for token in value)
        assert found[1].tolist() == value


@pytest.mark.parametrize(
    "text",
    [
        "[]", "[ ]", "[[1],[2]]", "[1 2]", "[1,]", "[01]", "[-1]", "[1.0]", "[1e2]", "[true]",
        "12", '"12"', "[2147483648]", "[99999999999999999999999]", "[18446744073709551617]", "",
    ],
)  # fmt: skip
def test_what_is_no_list_of_token_ids_is_refused(text: str) -> None:
    assert split_prompt(b'{"token_ids": ' + text.encode() + b"}") is None


def test_spaces_and_repeated_members_change_nothing() -> None:
    found = split_prompt(b' {"token_ids": ["x"], "a": "\xc3\xa9", "token_ids": [ 1, 2 ,3 ] } ')
    assert found is not None
    assert (found[1].tolist(), found[0]["a"]) == ([1, 2, 3], "é")
    assert split_prompt(b'{"token_ids": [1], "a": "\xff"}') is None
    assert split_prompt(b"[1]") is None


LONG = [{"token": "é", "logprob": -0.125, "top_logprobs": []}] * 400


@given(st.dictionaries(st.text(), JSON, max_size=3), st.lists(st.integers(0, 9), max_size=5))
def test_an_answer_goes_on_as_it_came(others: dict[str, Any], tokens: list[int]) -> None:
    choice = {"index": 0, "token_ids": tokens, "logprobs": {"content": LONG}}
    body = {**others, "prompt_logprobs": None, "choices": [choice]}
    content = orjson.dumps(body)
    assert len(content) >= RAW_BYTES_MIN
    found: Any = parsed_answer(content)
    assert type(found["choices"][0]["logprobs"]) is msgspec.Raw
    assert found["prompt_logprobs"] is None
    assert orjson.loads(msgspec.json.encode(found)) == body


@pytest.mark.parametrize("choices", [None, [], {}, "x", [1], [None], [[]]])
def test_a_strange_answer_is_what_the_whole_parser_says(choices: Any) -> None:
    content = orjson.dumps({"choices": choices, "logprobs": None, "pad": "x" * RAW_BYTES_MIN})
    assert parsed_answer(content) == orjson.loads(content)


@pytest.mark.parametrize("torn", [b'"\xff"', b"NaN", b"[1", b"{", b"01"])
def test_an_answer_that_is_no_json_is_none(torn: bytes) -> None:
    pad = b'"pad": "' + b"x" * RAW_BYTES_MIN + b'"'
    assert parsed_answer(b'{"choices": [{"logprobs": ' + torn + b"}], " + pad + b"}") is None
