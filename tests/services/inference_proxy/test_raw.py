"""Reading only a part of large JSON says the same as reading all of it."""

import json
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.inference_proxy.limits import TOKEN_ID_MAX
from services.inference_proxy.nesting import NESTING_MAX
from services.inference_proxy.prompts import DIGITS_MAX, Prompt, count_of
from services.inference_proxy.raw import (
    RAW_BYTES_MIN,
    REST_BYTES_MAX,
    parsed_answer,
    split_prompt,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e300, 1e300) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


SEEN = 10**DIGITS_MAX - 1


@given(
    st.lists(st.integers(0, SEEN), min_size=1),
    st.dictionaries(st.text(), JSON),
    st.dictionaries(st.text(), JSON),
    st.sampled_from([(",", ":"), (", ", ": "), (",", " :\n")]),
)
def test_a_prompt_is_read_as_the_whole_parser_reads_it(
    tokens: list[int],
    before: dict[str, Any],
    after: dict[str, Any],
    separators: tuple[str, str],
) -> None:
    body = {**before, "token_ids": tokens, **after}
    found = split_prompt(json.dumps(body, separators=separators, ensure_ascii=False).encode())
    assert found is not None
    assert len(found[1]) == len(tokens)
    assert found[1].tokens.tolist() == tokens == Prompt.of(tokens).tokens.tolist()
    assert orjson.loads(msgspec.json.encode(found[0])) == body


def test_prompts_are_the_same_however_they_were_written() -> None:
    texts = [b"[1,20,3]", b"[1, 20, 3]"]
    prompts = [Prompt.of([1, 20, 3]), *(Prompt(text, 3) for text in texts)]
    settled = Prompt.of([1, 20, 3])
    settled.settle()
    for one in [*prompts, settled]:
        assert one.size_bytes >= 12
        assert all(one.same_as(other) for other in prompts)
        assert one.size_bytes >= 12
    assert not prompts[0].same_as(Prompt.of([1, 20]))
    assert not prompts[0].same_as(Prompt.of([1, 20, 4]))


@given(st.text("01298, ", max_size=24) | st.text("0123456789,", max_size=60))
def test_a_text_is_counted_only_if_it_is_a_list_of_token_ids(inner: str) -> None:
    text = f"[{inner}]".encode()
    count = count_of(text)
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        value = None
    if count is not None:
        assert value == Prompt(text, count).tokens.tolist()
        assert (count, max(value) <= SEEN) == (len(value), True)
    elif value and "  " not in inner and " ," not in inner and inner == inner.strip():
        assert max(value) > SEEN  # nothing else that is right may be missed


INSIDE: list[dict[str, Any]] = [
    {"other": '"token_ids": [7]', "token_ids": [1, 2]},
    {'"token_ids': [7], "token_ids": [1, 2]},
    {"other": {"token_ids": [7]}, "token_ids": [1, 2]},
    {"other": [{"token_ids": [7, 8]}], "token_ids": [1, 2]},
    {"token_ids": [1, 2], "other": {"token_ids": [7]}},
    {"other": {"token_ids": [7]}},
    {"token_ids": {"token_ids": [7]}},
    {"x\\": 1, "token_ids": [1, 2]},
]


@pytest.mark.parametrize("body", INSIDE, ids=str)
def test_only_the_request_s_own_prompt_is_taken(body: dict[str, Any]) -> None:
    found = split_prompt(orjson.dumps(body))
    if found is not None:
        assert found[1].tokens.tolist() == body["token_ids"]
        assert orjson.loads(msgspec.json.encode(found[0])) == body


@pytest.mark.parametrize(
    "content",
    [
        b'{"token_ids": [7], "token_ids": [1, 2]}',
        b'{"token_ids": [7], "token_ids": "x"}',
        b'{"token_ids": [7], "token_\\u0069ds": [1, 2]}',
        b'{"token_\\u0069ds": [7], "token_ids": [1, 2]}',
    ],
)
def test_the_last_of_several_prompts_stands(content: bytes) -> None:
    found = split_prompt(content)
    if found is not None:
        assert found[1].tokens.tolist() == orjson.loads(content)["token_ids"]
        assert orjson.loads(msgspec.json.encode(found[0])) == orjson.loads(content)


def test_much_beside_a_prompt_is_left_to_a_thread() -> None:
    for size, is_taken in ((REST_BYTES_MAX - 100, True), (REST_BYTES_MAX, False)):
        content = b'{"token_ids": [1], "x": "%b"}' % (b"x" * size)
        assert (split_prompt(content) is not None) == is_taken


def test_what_nests_too_deep_beside_a_prompt_is_left_to_the_whole_parser() -> None:
    for depth, is_taken in ((NESTING_MAX - 1, True), (NESTING_MAX, False)):
        rest = b"[" * depth + b"]" * depth
        assert (split_prompt(b'{"token_ids": [1], "x": %b}' % rest) is not None) == is_taken


@given(
    st.lists(JSON, min_size=1)
    | JSON
    | st.lists(st.integers(0, TOKEN_ID_MAX) | st.booleans() | st.floats(0, 9))
)
def test_a_prompt_that_is_none_is_left_to_the_whole_parser(value: Any) -> None:
    found = split_prompt(orjson.dumps({"token_ids": value}))
    if found is not None:
        assert all(type(token) is int and 0 <= token <= TOKEN_ID_MAX for token in value)
        assert found[1].tokens.tolist() == value


@pytest.mark.parametrize(
    "text",
    [
        "[]", "[ ]", "[[1],[2]]", "[1 2]", "[1,]", "[01]", "[-1]", "[1.0]", "[1e2]", "[true]",
        "12", '"12"', "[1,,2]", "[,1]", "[1 ,2]", "[1,  2]", "[ 1]", "[1 ]", "[00]", "[1,00]",
        "[2147483648]", "[99999999999999999999999]", "[18446744073709551617]", "",
    ],
)  # fmt: skip
def test_what_is_no_list_of_token_ids_is_refused(text: str) -> None:
    assert split_prompt(b'{"token_ids": ' + text.encode() + b"}") is None


def test_spaces_around_members_change_nothing() -> None:
    found = split_prompt(b' { "a" : "\xc3\xa9" , "token_ids"\t:\r\n[1, 2,3] } ')
    assert found is not None
    assert (found[1].tokens.tolist(), found[0]["a"]) == ([1, 2, 3], "é")
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
