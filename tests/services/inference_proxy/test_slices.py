"""Long lists are read a part at a time, and say the same as when they are read whole."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.inference_proxy import limits, prompts, raw, slices
from services.inference_proxy.answers import MalformedAnswer, read_token_ids
from services.inference_proxy.endpoints import body
from services.inference_proxy.endpoints.plain import plain_body
from services.inference_proxy.prompts import Prompt, numbers_in
from services.inference_proxy.raw import RAW_BYTES_MIN, parsed_answer
from services.inference_proxy.slices import is_list_of_lists, opened, parsed_list
from tests.services.inference_proxy.harness import request_body, running
from tests.services.inference_proxy.stub import StubEngine
from tests.services.inference_proxy.test_spill import (
    test_a_stock_engine_answers_by_handle_through_the_proxy as a_spilled_answer_is_right,
)
from tests.services.inference_proxy.test_turns_kept import (
    test_what_is_kept_is_what_the_answer_said as a_kept_turn_is_right,
)

NUMBER = st.integers(-5, 2**40) | st.floats(-9, 9) | st.none()
ROWS = st.lists(st.lists(NUMBER, max_size=4), max_size=8)
NESTED = st.recursive(
    NUMBER | st.booleans() | st.text("],[1", max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("],[", max_size=3), inner),
    max_leaves=12,
)


@pytest.fixture(scope="module", autouse=True)
def short_slices() -> Iterator[None]:
    """Parts of a few bytes, so that the lists of a test have many."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (slices, prompts, raw):
            patch.setattr(module, "SLICE_BYTES", 3)
        patch.setattr(raw, "RAW_BYTES_MIN", 8)
        yield


def said(text: bytes, parse: Any) -> Any:
    try:
        return parse(text)
    except orjson.JSONDecodeError as exc:
        return str(exc)


@given(ROWS | st.lists(NUMBER) | st.lists(NESTED), st.data())
def test_a_list_read_in_parts_is_the_list(value: list[Any], data: st.DataObject) -> None:
    text = orjson.dumps(value, option=data.draw(st.sampled_from([None, orjson.OPT_INDENT_2])))
    assert parsed_list(text) == orjson.loads(text)
    at = data.draw(st.integers(0, len(text)))
    changed = (
        text[:at]
        + data.draw(st.sampled_from([b",", b"]", b"[", b"],[", b"1", b" "]))
        + (text[at + data.draw(st.integers(0, 1)) :])
    )
    assert said(changed, parsed_list) == said(changed, orjson.loads)


@pytest.mark.parametrize(
    "text",
    [
        b"[1,2,3,]",
        b"[1,,2,3]",
        b"[[1],[2],]",
        b"[[1],[2]]]",
        b"[[1],2,[3],[4]]",
        b"[[1,[2]]]",
        b"11,2,3,[4]]",
    ],
)
def test_a_wrong_list_is_refused_in_the_parser_s_words(text: bytes) -> None:
    assert said(text, parsed_list) == said(text, orjson.loads)


@given(st.lists(NESTED) | ROWS)
def test_what_counts_as_a_list_of_lists_is_one(value: list[Any]) -> None:
    text = orjson.dumps(value)
    if is_list_of_lists(memoryview(text)):
        assert all(type(row) is list for row in value)
        assert not any(isinstance(each, (list, dict, str)) for row in value for each in row)
    elif value and all(type(row) is list for row in value):
        assert any(isinstance(each, (list, dict, str, bool)) for row in value for each in row)


@pytest.mark.parametrize("rows", ["[[1]", "[[1,2],[3]", "[[" + "1234567," * 100 + "1]"])
@pytest.mark.parametrize("number", ["1e309", "-1E400", "2.5e+999", "1" * 310, "9" * 299 + "e10"])
def test_an_answer_with_a_number_that_no_float_holds_is_no_json(rows: str, number: str) -> None:
    text = f"{rows},[{number}],[4,5]]".encode()
    assert msgspec.json.decode(text, type=msgspec.Raw)
    assert not is_list_of_lists(memoryview(text))
    for name in ("sampling_mask", "sampling_mask_logprobs"):
        content = b'{"choices":[{"index":0,"%b":%b}]}' % (name.encode(), text)
        assert parsed_answer(content) is None
    plain = text.replace(number.encode(), b"1e-309")
    assert is_list_of_lists(memoryview(plain))
    assert opened(msgspec.Raw(plain)) == orjson.loads(plain)


@given(st.lists(st.integers(0, 10**9 - 1), min_size=1), st.sampled_from([b",", b", "]))
def test_numbers_read_in_parts_are_the_numbers(tokens: list[int], comma: bytes) -> None:
    found = numbers_in(comma.join(b"%d" % token for token in tokens))
    assert (found.dtype, found.tolist()) == (np.dtype(np.int32), tokens)


@given(ROWS.filter(bool), st.lists(st.integers(0, 99), min_size=1))
def test_kept_sets_of_an_answer_go_on_as_they_came(masks: Any, tokens: list[int]) -> None:
    choice = {"index": 0, "token_ids": tokens, "sampling_mask": masks, "other": [[["x"]]]}
    content = orjson.dumps({"choices": [choice], "pad": "x" * RAW_BYTES_MIN})
    found: Any = parsed_answer(content)
    (answered,) = found["choices"]
    if len(orjson.dumps(masks)) > slices.SLICE_BYTES:
        assert type(answered["sampling_mask"]) is msgspec.Raw
    assert opened(answered["sampling_mask"]) == masks
    assert (answered["token_ids"], answered["other"]) == (tokens, [[["x"]]])
    assert orjson.loads(msgspec.json.encode(found)) == orjson.loads(content)


async def test_who_looks_at_kept_sets_opens_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens = 0

    def counted(rows: Any) -> Any:
        nonlocal opens
        opens += isinstance(rows, msgspec.Raw)
        return opened(rows)

    for module in ("recording", "spill"):
        monkeypatch.setattr(f"services.inference_proxy.{module}.opened", counted)
    await a_kept_turn_is_right(tmp_path / "kept", "inline", is_pair=False, is_stream=False)
    assert opens == 1
    await a_spilled_answer_is_right(tmp_path / "spilled", is_pair=False)
    assert opens == 2


def test_a_long_prompt_is_read_before_the_loop_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    content = orjson.dumps(request_body([7] * 4000))
    assert len(content) >= RAW_BYTES_MIN - 1000
    found = plain_body(content + b" " * RAW_BYTES_MIN)
    assert found is not None
    monkeypatch.setattr(Prompt, "_read", None)
    assert found[1].tokens.tolist() == [7] * 4000


async def test_json_of_too_many_values_is_413_on_every_route(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body, "VALUES_MAX", 1000)
    async with running({"e0": StubEngine()}) as proxy:
        many = {**request_body([1, 2]), "stop_token_ids": [1] * 1000}
        chat = {"model": "m", "messages": [{"role": "user", "content": "x"}] * 400}
        for path, content in (("/inference/v1/generate", many), ("/v1/chat/completions", chat)):
            # A space that no plain request has, so that the documented way reads it.
            text = orjson.dumps(content).replace(b":", b" : ", 1)
            answer = await proxy.http.post(
                path, content=text, headers={"content-type": "application/json; a=b"}
            )
            assert (answer.status_code, answer.json()["code"]) == (413, "too_many_values")
            assert answer.json()["values_max"] == limits.VALUES_MAX
        few = {**chat, "messages": chat["messages"][:1]}
        assert (await proxy.http.post("/v1/chat/completions", json=few)).status_code == 200


def test_a_choice_of_more_tokens_than_any_model_samples_is_malformed() -> None:
    tokens = [1] * (limits.COMPLETION_TOKENS_MAX + 1)
    assert len(read_token_ids({"token_ids": tokens[1:]}, 0)) == limits.COMPLETION_TOKENS_MAX
    with pytest.raises(MalformedAnswer, match="at most 1048576 are taken"):
        read_token_ids({"token_ids": tokens}, 0)
