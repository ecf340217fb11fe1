"""What one NFS client does, as a command: ``python -m tests.nfs.side ACTION ROOT RUN``.

write: makes the root of RUN anew and publishes requests; prints their segments, one JSON a line.
read: reads every segment that ``ROOT/../segments-RUN`` lists and compares it with the seeded rows.
delete: removes every eighth file.
Each prints one JSON object of figures at the end.
"""

import json
import sys
import time
from pathlib import Path

import msgspec
import numpy as np

from sideband.ids import RequestId, RunId
from sideband.model import ModelShape
from sideband.payload.columns import ChoicePayload
from sideband.payload.errors import PayloadError
from sideband.payload.reader import PayloadReader
from sideband.payload.root import PayloadRoot
from sideband.payload.writer import write_payload
from sideband.segments import PayloadSegment
from sideband.testing.payloads import random_choice

REQUESTS = 24
WAITS_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0)  # of a rank's retry plan
MODEL = ModelShape(num_layers=8, layer_ids=(1, 3, 5, 7), top_k=4, id_space=300, vocab_size=5003)


def choice_of(serial: int) -> ChoicePayload:
    rng = np.random.default_rng(serial)
    return random_choice(rng, MODEL, prompt_tokens=200, completion_tokens=60, kept_max=20)


def list_of(root: Path, run_id: str) -> Path:
    return root.parent / f"segments-{run_id}"


def write(root: Path, run_id: str) -> dict[str, float]:
    opened = PayloadRoot.create(root, RunId(run_id), fresh=True)
    found = []
    for serial in range(REQUESTS):
        report = write_payload(
            opened,
            policy_version=serial % 3,
            request_id=RequestId(f"req-{serial}"),
            model=MODEL,
            choices=[choice_of(serial)],
        )
        (routing,) = [one for one in report.segments[0] if one.field == "routed_experts"]
        found.append(routing)
    aside = list_of(root, run_id).with_suffix(".aside")
    aside.write_bytes(msgspec.json.encode(found))
    aside.rename(list_of(root, run_id))
    return {"written": len(found)}


def read(root: Path, run_id: str) -> dict[str, float]:
    segments = msgspec.json.decode(list_of(root, run_id).read_bytes(), type=list[PayloadSegment])
    right = wrong = gone = tries = 0
    begin = time.monotonic()
    with PayloadReader(PayloadRoot.open(root, run_id=RunId(run_id)), model=MODEL) as reader:
        for serial, segment in enumerate(segments):
            out = np.empty((segment.rows, *segment.shape), segment.dtype)
            try:
                tries += read_patiently(reader, segment, out)
            except PayloadError:
                gone += 1
                continue
            routing = choice_of(serial).routing
            assert routing is not None
            same = np.array_equal(out, routing.rows_NLK[: segment.rows])
            right, wrong = right + same, wrong + (not same)
    seconds = time.monotonic() - begin
    return {"right": right, "wrong": wrong, "gone": gone, "tries": tries, "seconds": seconds}


def read_patiently(
    reader: PayloadReader,
    segment: PayloadSegment,
    out: np.ndarray[tuple[int, ...], np.dtype[np.uint16]],
) -> int:
    """As a rank does: again while the error says that it helps. The tries that it took."""
    for tries, wait_s in enumerate(WAITS_S, start=1):
        try:
            reader.read_routing(segment, out)
        except PayloadError as exc:
            if not exc.is_retryable:
                raise
            reader.forget(segment.file)
            time.sleep(wait_s)
        else:
            return tries
    reader.read_routing(segment, out)
    return len(WAITS_S) + 1


def delete(root: Path, run_id: str) -> dict[str, float]:
    segments = msgspec.json.decode(list_of(root, run_id).read_bytes(), type=list[PayloadSegment])
    opened = PayloadRoot.open(root, run_id=RunId(run_id))
    freed = [opened.delete(segment.file) for segment in segments[::8]]
    return {"deleted": sum(size > 0 for size in freed)}


if __name__ == "__main__":
    action, root, run_id = sys.argv[1:]
    figures = {"write": write, "read": read, "delete": delete}[action](Path(root), run_id)
    sys.stdout.write(json.dumps(figures) + "\n")
