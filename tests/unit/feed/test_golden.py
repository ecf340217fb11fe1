"""Bytes of the step format and of every ZMQ message, held still.

A difference here is a new version of the format (docs/feed-protocol.md section 4), never a new
golden file. ``python -m tests.unit.feed.test_golden`` writes the files of a NEW version.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from sideband.batch.chunks import cut_chunk
from sideband.feed.codec import decode_chunk, decode_step, encode_chunk, encode_step
from sideband.feed.errors import UnsupportedProtocol
from sideband.feed.frames import (
    Frame,
    decode_message,
    encode_message,
    encode_micro_batch,
    with_release,
)
from sideband.feed.messages import (
    FROM_FEED,
    FROM_RANK,
    AbortMessage,
    ByeMessage,
    CommitMessage,
    CommittedMessage,
    EndMessage,
    FailMessage,
    Header,
    HelloMessage,
    MicroBatchMessage,
    PingMessage,
    PongMessage,
    ProgressMessage,
    RefusedMessage,
    ReleaseMessage,
    ResyncMessage,
    WelcomeMessage,
)
from sideband.segments import Form
from sideband.testing.batches import WIDE_MODEL, make_sample
from tests.unit.feed.builders import assert_same_rows, make_step

GOLDEN: Final = Path(__file__).parents[2] / "golden"
FORMS: Final[tuple[Form, ...]] = ("handle", "inline")

MESSAGES: Final[dict[str, Header]] = {
    "hello": HelloMessage(
        instance="process-1",
        run_id="run-a",
        global_rank=3,
        dp_rank=1,
        cp_rank=1,
        committed_step=4,
        committed_lineage=1,
        resume_step=5,
        resume_index=2,
        lineage=1,
        credit=4,
        model=WIDE_MODEL,
    ),
    "hello-shortest": HelloMessage(instance="process-1", dp_rank=0, cp_rank=0, credit=1),
    "progress": ProgressMessage(seq=7, step=5, index=3),
    "commit": CommitMessage(run_id="run-a", global_rank=3, step=5, lineage=1),
    "commit-shortest": CommitMessage(run_id="run-a", global_rank=3, step=5),
    "fail": FailMessage(run_id="run-a", global_rank=3, step=5, reason="no such file"),
    "ping": PingMessage(run_id="run-a", global_rank=3),
    "bye": ByeMessage(),
    "welcome": WelcomeMessage(
        run_id="run-a",
        global_rank=3,
        dp_size=2,
        cp_size=2,
        layout="zigzag",
        rank_count=4,
        generation=1,
        committed_step=4,
    ),
    "refused": RefusedMessage(code="rank_in_use", reason="held", retry_after_s=0.5),
    "micro-batch": MicroBatchMessage(
        run_id="run-a",
        lineage=1,
        step=5,
        index=0,
        count=2,
        fields=("routed_experts", "sampling_mask"),
        model=WIDE_MODEL,
    ),
    "micro-batch-with-release": MicroBatchMessage(
        run_id="run-a", lineage=0, step=5, index=1, count=2, fields=(), released=(5, 1)
    ),
    "release": ReleaseMessage(step=5, index=1),
    "committed": CommittedMessage(step=5),
    "abort": AbortMessage(step=5, reason="no such file"),
    "pong": PongMessage(committed_step=4, waiting_for=(2,)),
    "end": EndMessage(last_step=5),
    "resync": ResyncMessage(),
}


def golden_step(form: Form) -> bytes:
    samples = [
        make_sample(i, tokens=6 + i, prompt_tokens=2, form=form, breaks=(3,),
                    gaps=((1, 2),), with_weight_versions=True)
        for i in range(3)
    ]  # fmt: skip
    step = make_step(samples=samples, form=form, dp_size=1, cp_size=2, layout="zigzag", seq_len=32)
    return encode_step(step)


def golden_chunk() -> bytes:
    batch = decode_step(golden_step("handle")).grid[0][0]
    return encode_chunk(cut_chunk(batch, cp_rank=0, cp_size=2, layout="zigzag"), WIDE_MODEL)


def golden_messages() -> bytes:
    """One line per message: its name and its frames in hexadecimal."""
    lines = []
    for name, header in MESSAGES.items():
        frames: Sequence[Frame] = encode_message(header)
        if isinstance(header, MicroBatchMessage):
            frames = with_release(encode_micro_batch(header, b"chunk"), header.released)
        lines.append(f"{name} {' '.join(bytes(frame).hex() for frame in frames)}\n")
    return "".join(lines).encode()


def files() -> dict[str, bytes]:
    return {
        "feed-step-v1-handle.bin": golden_step("handle"),
        "feed-step-v1-inline.bin": golden_step("inline"),
        "feed-chunk-v1.bin": golden_chunk(),
        "feed-messages-v4.txt": golden_messages(),
    }


@pytest.mark.parametrize("name", sorted(files()))
def test_what_is_written_has_not_changed(name: str) -> None:
    assert files()[name] == (GOLDEN / name).read_bytes()


@pytest.mark.parametrize("form", FORMS)
def test_a_golden_step_is_read_as_it_was_meant(form: Form) -> None:
    step = decode_step((GOLDEN / f"feed-step-v1-{form}.bin").read_bytes())
    assert (step.run_id, step.step, step.model) == ("run-a", 1, WIDE_MODEL)
    assert (step.dp_size, step.cp_size, step.layout) == (1, 2, "zigzag")
    expected = decode_step(golden_step(form))
    for got, batch in zip(step.grid[0], expected.grid[0], strict=True):
        assert_same_rows(got, batch)
    first = step.grid[0][0]
    sample = make_sample(2, tokens=8, prompt_tokens=2)
    np.testing.assert_array_equal(first.token_ids_L[:8], sample.token_ids_T)
    np.testing.assert_array_equal(first.logprobs_L[:8], sample.logprobs_T)


def test_a_golden_chunk_is_read_as_it_was_meant() -> None:
    chunk = decode_chunk((GOLDEN / "feed-chunk-v1.bin").read_bytes(), WIDE_MODEL)
    batch = decode_step(golden_step("handle")).grid[0][0]
    assert_same_rows(chunk, cut_chunk(batch, cp_rank=0, cp_size=2, layout="zigzag"))


def test_every_golden_message_is_read_as_it_was_meant() -> None:
    for line in (GOLDEN / "feed-messages-v4.txt").read_text().splitlines():
        name, *frames = line.split(" ")
        header, body = decode_message([bytes.fromhex(f) for f in frames], FROM_RANK | FROM_FEED)
        assert header == MESSAGES[name]
        assert body == (b"chunk" if name.startswith("micro-batch") else None)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_messages_of_earlier_versions_are_refused_by_both_names(version: int) -> None:
    for line in (GOLDEN / f"feed-messages-v{version}.txt").read_text().splitlines():
        frames = [bytes.fromhex(frame) for frame in line.split(" ")[1:]]
        with pytest.raises(UnsupportedProtocol) as caught:
            decode_message(frames, FROM_RANK | FROM_FEED)
        assert (caught.value.version, caught.value.readable) == (version, 4)
        assert str(caught.value) == f"feed protocol {version} is not spoken here, only 4"


def test_every_message_has_a_golden_line() -> None:
    kinds = {type(header) for header in MESSAGES.values()}
    assert kinds == set((FROM_RANK | FROM_FEED).values())


if __name__ == "__main__":
    for file_name, content in files().items():
        (GOLDEN / file_name).write_bytes(content)
