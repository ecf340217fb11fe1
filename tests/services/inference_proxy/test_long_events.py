"""Large events of a stream: in the parts in which they came, and the same as if they were whole."""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.inference_proxy import events
from services.inference_proxy.answers import MalformedAnswer
from services.inference_proxy.events import (
    EventSplitter,
    data_of,
    is_end,
    joined_if_small,
    read_event,
)
from services.inference_proxy.long_json import TooMuchBeside
from services.inference_proxy.planning import Call, make_plan
from services.inference_proxy.prompts import Prompt
from services.inference_proxy.relay import StreamRelay
from sideband.ids import RequestId

ENDS = (b"\n\n", b"\r\n\r\n")
TEXTS = st.lists(st.text('ab"é', max_size=12), max_size=4)


@given(
    TEXTS, st.integers(4, 30), st.sampled_from(ENDS), st.sampled_from([b"", b"data: {"]), st.data()
)
def test_an_event_in_parts_says_what_it_says_as_a_whole(
    texts: list[str], joined_bytes_max: int, end: bytes, rest: bytes, data: st.DataObject
) -> None:
    sent = [b"data: " + orjson.dumps({"a": text}) for text in texts]
    stream = b"".join(event + end for event in sent) + rest
    splitter = EventSplitter(bytes_max=1 << 20)
    found: list[tuple[bytes, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(events, "JOINED_BYTES_MAX", joined_bytes_max)
        while stream:
            size = data.draw(st.integers(1, len(stream)))
            found += list(splitter.feed(stream[:size]))
            stream = stream[size:]
        assert b"".join(splitter.rest()).rstrip() == rest
    assert [b"".join(parts).rstrip() for parts in found] == sent
    assert [read_event(parts) for parts in found] == [{"a": text} for text in texts]


def written_events() -> st.SearchStrategy[list[str]]:
    """Lines of an event: fields in any order, data in several lines, with and without a space."""
    bodies = st.dictionaries(st.sampled_from("abc"), st.text('ab"é\n', max_size=9), max_size=3)
    form = st.sampled_from([None, orjson.OPT_INDENT_2])
    objects = st.tuples(bodies, form).map(lambda one: orjson.dumps(one[0], option=one[1]).decode())
    said = st.one_of(objects, objects, st.sampled_from(["[DONE]", " [DONE]", "1", "{", ""]))
    data = st.tuples(said, st.sampled_from(["data:", "data: "])).map(
        lambda one: [one[1] + line for line in one[0].split("\n")]
    )
    other = st.sampled_from(
        [[], [": ping"], ["event: data:"], ["id: 1"], [""], ["data"], ["xdata: {}"]]
    )
    return st.tuples(other, data | other, other).map(
        lambda lines: [*lines[0], *lines[1], *lines[2]]
    )


def said_by(lines: list[str]) -> list[Any]:
    """What the events of a stream say, read line by line: of each an object, an end, or nothing."""
    found: list[Any] = []
    data: list[str] = []
    for line in lines:
        if line.startswith("data:"):
            data.append(line[5:])
        elif not line and data:
            found.append(said_in("\n".join(data)))
            data = []
    return found


def said_in(data: str) -> Any:
    if data.strip() == "[DONE]":
        return "end"
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return body if isinstance(body, dict) else None


@given(st.lists(written_events(), max_size=4), st.integers(4, 40), st.data())
def test_a_stream_says_what_its_lines_say_however_it_is_cut(
    written: list[list[str]], joined_bytes_max: int, data: st.DataObject
) -> None:
    ends = st.sampled_from(["\n", "\r\n"])
    lines = [line for event in written for line in (*event, "")]
    stream = "".join(line + data.draw(ends) for line in lines).encode()
    splitter, found = EventSplitter(bytes_max=1 << 20), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(events, "JOINED_BYTES_MAX", joined_bytes_max)
        while stream:
            size = data.draw(st.integers(1, min(len(stream), 60)))
            for event in splitter.feed(stream[:size]):
                text = data_of(event)
                if text is not None:
                    found.append("end" if is_end(text) else read_event(event))
            stream = stream[size:]
    assert found == said_by(lines)


@pytest.mark.parametrize("begin", ["", "\n", ": ping\n", "event: message\n", "id: 1\n"])
def test_no_data_of_an_event_passes_unread(begin: str) -> None:
    """Its tokens would be missing in the turn that is kept."""
    event = (begin.encode() + b'data: {"a": 1}',)
    assert read_event(event) == {"a": 1}
    call = Call(
        body={"sampling_params": {}},
        lazy_prompt=Prompt.of([1, 2]),
        kind="train",
        request_id=RequestId("r"),
        session_id=None,
        policy_version=None,
        headers=(),
    )
    plan = make_plan(call, session=None, policy_version=0, run_id=None)
    relay = StreamRelay(plan, RequestId("r"), None)
    with pytest.raises(MalformedAnswer):
        relay.take_other((begin.encode() + b"data: 1",))


def test_small_parts_are_sent_together_and_large_ones_are_not() -> None:
    assert joined_if_small([]) == []
    assert joined_if_small([b"a", b"b"]) == (b"ab",)
    large = [b"a", bytes(events.JOINED_BYTES_MAX)]
    assert joined_if_small(large) is large


def test_what_an_event_has_beside_its_rows_is_bounded() -> None:
    rows = b"A" * (1 << 20)
    event = (b'data: {"a":"', rows, b'","b":', b"[" + b"1," * 2_000_000 + b"1]}")
    body = read_event(event)
    assert body is not None
    assert len(body["b"]) == 2_000_001
    assert len(body["a"]) == len(rows)
    with pytest.raises(TooMuchBeside):
        read_event((*event[:3], b"[" + b"1," * 5_000_000 + b"1]}"))


def test_rows_that_came_in_small_parts_are_not_beside_themselves() -> None:
    rows = "A" * (9 << 20)
    stream = b"data: " + orjson.dumps({"a": rows}) + b"\n\n"
    splitter = EventSplitter(bytes_max=1 << 30)
    reads = [stream[at : at + 4344] for at in range(0, len(stream), 4344)]  # three packets each
    (event,) = [event for data in reads for event in splitter.feed(data)]
    body = read_event(event)
    assert body is not None
    is_same = b"".join(body["a"].parts) == rows.encode()  # megabytes belong into no message
    assert is_same
