"""The feed's decoders on changed steps, chunks and messages: a named error or a sound value.

``--fuzz-seconds N``: how long each test goes on (default: one seed).
"""

import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from hypothesis import strategies as st

from sideband.feed.answers import Answerer
from sideband.feed.codec import decode_chunk, decode_step, encode_chunk, encode_step
from sideband.feed.delivery import Delivery
from sideband.feed.errors import (
    MalformedFrame,
    MalformedStep,
    UnreadableStep,
    UnsupportedProtocol,
)
from sideband.feed.frames import Frame, decode_message, encode_message, encode_micro_batch
from sideband.feed.messages import FROM_FEED, FROM_RANK, Header, MicroBatchMessage
from sideband.feed.observer import FeedObserver
from sideband.feed.outgoing import outgoing_step
from sideband.testing.batches import WIDE_MODEL
from tests.fuzz.budget import Budget
from tests.fuzz.mutations import changed, overwritten, revalued
from tests.unit.feed.delivery_builders import PLAN
from tests.unit.feed.test_golden import MESSAGES, golden_chunk, golden_step

PEAK_BYTES_MAX: Final = 4 << 20  # of bodies of a few kilobytes
STEPS: Final = [golden_step("handle"), golden_step("inline")]
PREFIX_BYTES: Final = 4
SIZE: Final = struct.Struct("<I")


@contextmanager
def little_memory() -> Iterator[None]:
    """What is decoded inside may not allocate much at any time."""
    tracemalloc.start()
    try:
        yield
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < PEAK_BYTES_MAX


def mutated(data: st.DataObject, original: bytes, others: list[bytes]) -> bytes:
    """Other bytes, or other values in sound MessagePack."""
    how = data.draw(st.sampled_from(["bytes", "values", "same size"]), "how")
    if how == "values":
        return revalued(data, original)
    return changed(data, original, others) if how == "bytes" else overwritten(data, original)


def test_a_changed_step_is_refused_by_name_or_sound(budget: Budget) -> None:
    def check(data: st.DataObject) -> bool:
        body = mutated(data, data.draw(st.sampled_from(STEPS), "step"), STEPS)
        with little_memory():
            try:
                step = decode_step(body)
            except (MalformedStep, UnreadableStep):
                step = None
            try:
                outgoing = outgoing_step(body, lineage=0)
            except (MalformedStep, UnreadableStep):
                outgoing = None
        assert (step is None) == (outgoing is None), "both read the same steps"
        if step is not None and outgoing is not None:
            assert (outgoing.facts.step, outgoing.facts.count) == (step.step, len(step.grid[0]))
            assert encode_step(decode_step(encode_step(step))) == encode_step(step)
        return step is None

    budget.spend(check)


def test_a_changed_chunk_is_refused_by_name_or_sound(budget: Budget) -> None:
    original = golden_chunk()

    def check(data: st.DataObject) -> bool:
        body = mutated(data, original, STEPS)
        with little_memory():
            try:
                chunk = decode_chunk(body, WIDE_MODEL)
            except MalformedStep:
                return True
        again = encode_chunk(chunk, WIDE_MODEL)
        assert encode_chunk(decode_chunk(again, WIDE_MODEL), WIDE_MODEL) == again
        return False

    budget.spend(check)


def test_a_changed_message_is_refused_by_name_or_known(budget: Budget) -> None:
    """Both ways of every kind; and the feed has an answer to whatever a peer sends."""
    originals = [frames_of(header) for header in MESSAGES.values()]

    def check(data: st.DataObject) -> bool:
        frames = changed_frames(data, data.draw(st.sampled_from(originals), "message"))
        known = 0
        with little_memory():
            for kinds in (FROM_FEED, FROM_RANK):
                try:
                    header, _ = decode_message(frames, kinds)
                except (MalformedFrame, UnsupportedProtocol):
                    continue
                assert type(header) in kinds.values()
                known += 1
            answers = Answerer(Delivery(PLAN), FeedObserver()).answers(b"peer", frames, now_s=0.0)
        for answer in answers:
            assert decode_message(encode_message(answer), FROM_FEED) == (answer, None)
        return not known

    budget.spend(check)


def frames_of(header: Header) -> list[bytes]:
    """As they are sent; a release that rides along is a case of its own."""
    if isinstance(header, MicroBatchMessage):
        return [encode_micro_batch(header, golden_chunk())]
    return [bytes(frame) for frame in encode_message(header)]


def changed_frames(data: st.DataObject, original: list[bytes]) -> list[Frame]:
    """One frame changed, left out or doubled, or other values in the header."""
    frames: list[Frame] = list(original)
    place = data.draw(st.integers(0, len(frames) - 1), "frame")
    how = data.draw(st.sampled_from(["bytes", "values", "drop", "double", "none"]), "how")
    if how == "bytes":
        frames[place] = changed(data, original[place], original)
    elif how == "drop":
        del frames[place]
    elif how == "double":
        frames.insert(place, frames[place])
    elif how == "values":
        return list(revalued_header(data, original))
    return frames


def revalued_header(data: st.DataObject, original: list[bytes]) -> list[bytes]:
    """The header stands in a frame of its own, or behind the prefix, or behind its size too."""
    if len(original) == 2:
        return [original[0], revalued(data, original[1])]
    [frame] = original
    prefix, rest = frame[:PREFIX_BYTES], frame[PREFIX_BYTES:]
    if frame == encode_message(MESSAGES["progress"])[0]:
        return [prefix + revalued(data, rest)]
    [size] = SIZE.unpack_from(rest)
    header = revalued(data, rest[SIZE.size : SIZE.size + size])
    return [prefix + SIZE.pack(len(header)) + header + rest[SIZE.size + size :]]
