"""Frames between feed and rank: every malformed one is a named error."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sideband.feed.errors import MalformedFrame, UnsupportedProtocol
from sideband.feed.frames import decode_message, encode_message
from sideband.feed.limits import HEADER_BYTES_MAX, REASON_CHARS_MAX
from sideband.feed.messages import (
    FROM_FEED,
    FROM_RANK,
    MicroBatchMessage,
    ProgressMessage,
    shortened,
)

PROGRESS = {"seq": 1, "step": 1, "index": 0}
HELLO = {"instance": "p", "dp_rank": 0, "cp_rank": 0, "credit": 1}


def frames(kind: int, fields: object, *rest: bytes) -> list[bytes]:
    prefix, header = b"SB\x04" + bytes((kind,)), msgspec.msgpack.encode(fields)
    return [prefix + header, *rest] if kind == 2 else [prefix, header, *rest]


def micro_batch(fields: object, body: bytes = b"chunk", *rest: bytes) -> list[bytes]:
    header = msgspec.msgpack.encode(fields)
    return [b"SB\x04\x23" + len(header).to_bytes(4, "little") + header + body, *rest]


CASES: list[tuple[list[bytes], str]] = [
    ([], "prefix"),
    ([b"SB\x04"], "prefix"),
    ([b"SB\x04\x01\x00", b""], "prefix"),
    ([b"XX\x02\x01", b""], "prefix"),
    (frames(0, {}), "prefix"),
    (frames(3, {"step": 1, "index": 0}), "prefix"),
    (frames(33, {}), "prefix"),  # a feed's message from a rank
    (frames(2, {"seq": 1}, b"body"), "message"),
    ([b"SB\x04\x02", msgspec.msgpack.encode(PROGRESS)], "message"),
    ([b"SB\x04\x07"], "message"),
    ([b"SB\x04\x02"], "header"),
    ([b"SB\x04\x02" + b"\x00" * (HEADER_BYTES_MAX + 1)], "header"),
    ([b"SB\x04\x07", b"\x00" * (HEADER_BYTES_MAX + 1)], "header"),
    ([b"SB\x04\x02\xc1"], "header"),
    (frames(2, {}), "header"),
    (frames(2, {**PROGRESS, "seq": -1}), "header"),
    (frames(2, {**PROGRESS, "seq": 1 << 63}), "header"),
    (frames(2, {**PROGRESS, "seq": "1"}), "header"),
    (frames(2, {**PROGRESS, "more": 1}), "header"),
    (frames(2, [1, 1, 1]), "header"),
    (frames(2, {**PROGRESS, "step": 1 << 31}), "header"),
    (frames(2, {**PROGRESS, "index": 5000}), "header"),
    (frames(4, {"run_id": "a/b", "global_rank": 0, "step": 1}), "header"),
    (frames(4, {"run_id": "a\n", "global_rank": 0, "step": 1}), "header"),
    (frames(4, {"run_id": "a", "global_rank": 1 << 16, "step": 1}), "header"),
    (
        frames(
            5,
            {"run_id": "a", "global_rank": 0, "step": 1, "reason": "x" * (REASON_CHARS_MAX + 1)},
        ),
        "header",
    ),
    (frames(1, {**HELLO, "resume_step": 1}), "header"),
    (frames(1, {**HELLO, "instance": ""}), "header"),
    (frames(1, {**HELLO, "lineage": -1}), "header"),
    (frames(1, {**HELLO, "committed_step": 1, "committed_lineage": -1}), "header"),
    (frames(1, {**HELLO, "committed_lineage": 1}), "header"),
    (frames(1, {**HELLO, "instance": "p" * 129}), "header"),
    (
        frames(
            1,
            {
                **HELLO,
                "model": {
                    "num_layers": 1,
                    "layer_ids": [3],
                    "top_k": 1,
                    "id_space": 8,
                    "vocab_size": 9,
                },
            },
        ),
        "header",
    ),
]


@pytest.mark.parametrize(("message", "part"), CASES)
def test_a_malformed_message_names_its_part(message: list[bytes], part: str) -> None:
    with pytest.raises(MalformedFrame) as caught:
        decode_message(message, FROM_RANK)
    assert caught.value.part == part, str(caught.value)


def test_another_protocol_version_is_refused_before_the_header_is_read() -> None:
    with pytest.raises(UnsupportedProtocol) as caught:
        decode_message([b"SB\x01\x01"], FROM_RANK)
    assert (caught.value.version, caught.value.readable) == (1, 4)


MICRO_BATCH = {"run_id": "a", "lineage": 0, "step": 1, "index": 0, "count": 1, "fields": []}
RELEASED = msgspec.msgpack.encode({"step": 1, "index": 0})
MODEL = {"num_layers": 4, "layer_ids": [3], "top_k": 1, "id_space": 8, "vocab_size": 9}


def test_a_micro_batch_is_one_frame_and_may_bring_a_release() -> None:
    message, body = decode_message(micro_batch({**MICRO_BATCH, "model": MODEL}), FROM_FEED)
    assert isinstance(message, MicroBatchMessage)
    assert bytes(body or b"") == b"chunk"
    assert message.model is not None
    assert message.released is None
    message, _ = decode_message(micro_batch(MICRO_BATCH, b"chunk", RELEASED), FROM_FEED)
    assert isinstance(message, MicroBatchMessage)
    assert message.released == (1, 0)


@pytest.mark.parametrize(
    ("frames", "part"),
    [
        (micro_batch({**MICRO_BATCH, "model": {**MODEL, "num_layers": 1}}), "header"),
        (micro_batch({**MICRO_BATCH, "model": {**MODEL, "top_k": "1"}}), "header"),
        (micro_batch({**MICRO_BATCH, "model": b"\xc1"}), "header"),
        (micro_batch({**MICRO_BATCH, "more": 1}), "header"),
        (micro_batch({**MICRO_BATCH, "count": 0}), "header"),
        (micro_batch({**MICRO_BATCH, "lineage": -1}), "header"),
        (micro_batch({**MICRO_BATCH, "lineage": 1 << 31}), "header"),
        (micro_batch({k: v for k, v in MICRO_BATCH.items() if k != "lineage"}), "header"),
        (micro_batch({}), "header"),
        (micro_batch(MICRO_BATCH, b"", b"\xc1"), "header"),
        (micro_batch(MICRO_BATCH, b"", b"\x00" * (HEADER_BYTES_MAX + 1)), "header"),
        (micro_batch(MICRO_BATCH, b"", RELEASED, b""), "message"),
        ([b"SB\x04\x23"], "header"),
        ([b"SB\x04\x23\x01\x00\x00"], "header"),
        ([b"SB\x04\x23\x05\x00\x00\x00\x80"], "header"),
        ([b"SB\x04\x23\xff\xff\xff\xff" + bytes(HEADER_BYTES_MAX + 9)], "header"),
    ],
)
def test_a_malformed_micro_batch_names_its_part(frames: list[bytes], part: str) -> None:
    with pytest.raises(MalformedFrame) as caught:
        decode_message(frames, FROM_FEED)
    assert caught.value.part == part, str(caught.value)


def test_a_micro_batch_with_too_long_a_body_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sideband.feed.frames.STEP_BODY_BYTES_MAX", 4)
    with pytest.raises(MalformedFrame, match="body frame: holds more than 4 bytes"):
        decode_message(micro_batch(MICRO_BATCH), FROM_FEED)


@given(st.lists(st.binary(max_size=60), max_size=4), st.sampled_from([FROM_RANK, FROM_FEED]))
def test_any_frames_are_a_message_or_a_named_error(
    message: list[bytes], kinds: dict[int, type]
) -> None:
    try:
        decode_message([b"SB\x04" + message[0][:2], *message[1:]] if message else message, kinds)
    except (MalformedFrame, UnsupportedProtocol):
        return


@given(st.integers(0, 1 << 62))
def test_a_message_comes_back(seq: int) -> None:
    progress = ProgressMessage(seq=seq, step=3, index=1)
    assert decode_message(encode_message(progress), FROM_RANK) == (progress, None)


def test_a_long_reason_is_shortened_to_its_field() -> None:
    assert shortened("x") == "x"
    assert len(shortened("x" * 9999)) == REASON_CHARS_MAX
