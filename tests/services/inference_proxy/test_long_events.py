"""Large events of a stream: in the parts in which they came, and the same as if they were whole."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.inference_proxy import events
from services.inference_proxy.events import EventSplitter, joined_if_small, read_event
from services.inference_proxy.long_json import TooMuchBeside

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
