"""Large answers go the way of small ones: with every bound lowered, what a client gets and what is
handed in is what it is with none, whatever the answer has and however its bytes come.
"""

import base64
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import orjson
from hypothesis import given
from hypothesis import strategies as st

from services.inference_proxy.answers import Answer, Expected, MalformedAnswer
from services.inference_proxy.assembly import Outcome, from_one, from_pair
from services.inference_proxy.dialects.sglang import SglangDialect
from services.inference_proxy.dialects.vllm import VllmDialect
from services.inference_proxy.events import EventSplitter, joined_if_small
from services.inference_proxy.logprob_forms import LogprobForm, in_form
from services.inference_proxy.long_json import Parts, write_long
from services.inference_proxy.openai_stream import as_events, encoded
from services.inference_proxy.planning import Call, make_plan
from services.inference_proxy.prompts import Prompt
from services.inference_proxy.reading import read_openai, read_parts, read_whole
from services.inference_proxy.recording import TurnRecord, UnreadChoice
from services.inference_proxy.relay import StreamRelay
from services.inference_proxy.turn_schemas import turns_json, turns_packed
from services.inference_proxy.upstream import parsed
from services.kit.turns import TurnWire
from sideband.ids import RequestId
from sideband.model import ModelShape
from tests.services.inference_proxy.said import Said, bounds, cut, said, texts, written

ID = RequestId("r")
FORMS: tuple[LogprobForm, ...] = ("engine", "token_ids", "token_strings")
CHAT = "/v1/chat/completions"


MODEL = ModelShape(num_layers=3, layer_ids=(0, 1, 2), top_k=4, id_space=60, vocab_size=100)


def answers(legs: Sequence[tuple[Parts, Said]]) -> list[Answer]:
    return [read_whole(VllmDialect(), parts, expected_of(one)) for parts, one in legs]


def expected_of(one: Said) -> Expected:
    return Expected(
        prompt_tokens=len(one.prompt),
        policy_version=0,
        run_id=None,
        request_id=ID,
        choices=len(one.choices),
    )


def given_of(outcome: Outcome, prompt: list[int]) -> Any:
    """All that comes of an outcome: the answer in each form, and each choice as it is handed in."""
    content = write_long(outcome.body)
    shown = [orjson.loads(b"".join(content))]
    if all(choice.get("logprobs") is not None for choice in outcome.body["choices"]):
        for form in FORMS[1:]:
            body = {**outcome.body, "choices": in_form(outcome.body["choices"], form)}
            shown.append(orjson.loads(b"".join(write_long(body))))
    turns = []
    for index in outcome.token_ids:
        choice = UnreadChoice(
            index=index,
            choice_count=len(outcome.token_ids),
            answer=content,
            request_id=ID,
            prompt=Prompt.of(prompt),
            params={},
        )
        turns.append(choice.encoded())
    return shown, handed_in(turns), outcome.ranges


def handed_in(turns: Sequence[Parts | None]) -> Any:
    """Of the turns that can be given, both forms."""
    encoded_turns = [turn for turn in turns if turn is not None]
    if not encoded_turns:
        return []
    packed = msgspec.msgpack.decode(b"".join(turns_packed(encoded_turns)), type=list[TurnWire])
    return (
        [turn is None for turn in turns],
        packed,
        orjson.loads(b"".join(turns_json(encoded_turns))),
    )


def same(plain: Callable[[], Any], large: Callable[[], Any], size: int) -> None:
    """They give the same, or refuse it both."""
    expected = _tried(plain)
    with bounds(size):
        assert _tried(large) == expected


def _tried(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except MalformedAnswer:
        return "malformed"


@given(said(), st.integers(7, 200), st.data())
def test_an_answer_of_one_engine(one: Said, size: int, data: st.DataObject) -> None:
    content = written(one.body, data.draw)
    if data.draw(st.booleans()):  # a byte of it is another one
        at = data.draw(st.integers(0, len(content) - 1))
        content = content[:at] + data.draw(st.sampled_from([b"A", b'"', b"\\"])) + content[at + 1 :]
    parts = cut(content, data.draw)

    def all_of(content: Parts) -> Any:
        (answer,) = answers([(content, one)])
        outcome = from_one(answer, request_id=ID, prompt_tokens=len(one.prompt), prompt_start=0)
        return given_of(outcome, one.prompt)

    same(lambda: all_of((content,)), lambda: all_of(parts), size)


@given(said(), st.integers(7, 200), st.data())
def test_an_answer_of_sglang(one: Said, size: int, data: st.DataObject) -> None:
    items = []
    for choice in one.choices:
        tokens, pairs = choice["token_ids"], choice["logprobs"] or {"content": []}
        count = len(one.prompt) + len(tokens) - 1
        ids = np.random.default_rng(count).integers(0, 60, (count, 3, 4)).astype("<i4")
        meta = {
            "id": "x",
            "finish_reason": {"type": "stop", "matched": data.draw(texts())},
            "routed_experts": base64.b64encode(ids.tobytes()).decode(),
            "output_token_logprobs": [[e["logprob"], e["token_id"], "a"] for e in pairs["content"]],
        }
        items.append({"text": choice["text"], "output_ids": tokens, "meta_info": meta})
    content = written(items, data.draw)
    parts = cut(content, data.draw)
    expected = expected_of(one)

    def all_of(content: Parts) -> Any:
        answer = read_whole(SglangDialect(MODEL), content, expected)
        outcome = from_one(answer, request_id=ID, prompt_tokens=len(one.prompt), prompt_start=0)
        assert outcome.has_inline
        return given_of(outcome, one.prompt)

    same(lambda: all_of((content,)), lambda: all_of(parts), size)


@given(said(choices_max=1), said(choices_max=1, rows_from=None), st.integers(7, 200), st.data())
def test_an_answer_of_a_pair(first: Said, second: Said, size: int, data: st.DataObject) -> None:
    second = Said(first.prompt, second.choices, second.beside)
    contents = [written(one.body, data.draw) for one in (first, second)]
    parts = [cut(content, data.draw) for content in contents]

    def all_of(contents: Sequence[Parts]) -> Any:
        prefill, decode = answers(list(zip(contents, (first, second), strict=True)))
        outcome = from_pair(
            prefill, decode, request_id=ID, prompt_tokens=len(first.prompt), prompt_start=0
        )
        return given_of(outcome, first.prompt)

    same(lambda: all_of([(content,) for content in contents]), lambda: all_of(parts), size)


@given(said(choices_max=2), st.booleans(), st.sampled_from(FORMS), st.integers(7, 200), st.data())
def test_a_stream(
    one: Said, is_pair: bool, form: LogprobForm, size: int, data: st.DataObject
) -> None:
    first = data.draw(said(choices_max=1)) if is_pair else None
    if first is not None:
        one = Said(first.prompt, data.draw(said(choices_max=1, rows_from=None)).choices, one.beside)
    bodies = [{**one.beside, "choices": [choice]} for choice in one.choices]
    ends = [data.draw(st.sampled_from([b"\n\n", b"\r\n\r\n"])) for _ in bodies]
    lines = [b"data: " + orjson.dumps(body) + end for body, end in zip(bodies, ends, strict=True)]
    stream = b"".join([*lines, b"data: [DONE]\n\n"])
    content = (orjson.dumps(first.body),) if first is not None else ()
    call = Call(
        body={"sampling_params": {"n": len(one.choices)}},
        lazy_prompt=Prompt.of(one.prompt),
        kind="train",
        request_id=ID,
        session_id=None,
        policy_version=None,
        headers=(),
        logprob_form=form,
    )
    plan = make_plan(call, session=None, policy_version=0, run_id=None)

    def all_of(stream: Parts, content: Parts) -> Any:
        prefill = None if first is None else answers([(content, first)])[0]
        record = TurnRecord()
        relay = StreamRelay(plan, ID, prefill, record)
        splitter = EventSplitter(bytes_max=1 << 20)
        out: list[bytes] = []
        for part in stream:
            for event in splitter.feed(part):
                out += joined_if_small(relay.take(event))
        turns = record.encoded(ID, plan.prompt, {})
        shown = [line[6:] for line in b"".join(out).split(b"\n\n")]
        assert shown[-2:] == [b"[DONE]", b""]
        return [orjson.loads(body) for body in shown[:-2]], handed_in(list(turns.values()))

    parts = cut(stream, data.draw)
    prefill_parts = cut(content[0], data.draw) if content else ()
    same(lambda: all_of((stream,), content), lambda: all_of(parts, prefill_parts), size)


@given(said(), st.booleans(), st.integers(7, 200), st.data())
def test_an_answer_of_a_chat(one: Said, with_usage: bool, size: int, data: st.DataObject) -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": data.draw(texts())}}]
    message = {"content": data.draw(texts()), "reasoning": data.draw(texts()), "tool_calls": calls}
    choices = [{**choice, "message": message} for choice in one.choices]
    body = {**one.body, "prompt_token_ids": one.prompt, "choices": choices}
    content = written(body, data.draw)
    parts = cut(content, data.draw)

    def all_of(content: Parts) -> Any:
        answer, read = read_openai(VllmDialect(), read_parts(content, parsed), CHAT)
        streamed = b"".join(as_events(answer, CHAT, with_usage=with_usage)).split(b"\n\n")
        said = [orjson.loads(line[6:]) for line in streamed[:-2]]
        return (
            orjson.loads(b"".join(encoded(answer))),
            said,
            orjson.loads(b"".join(write_long(read))),
        )

    same(lambda: all_of((content,)), lambda: all_of(parts), size)
