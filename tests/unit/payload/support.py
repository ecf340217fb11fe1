"""What the tests of payload files share: models, one written file, rows as plain data.

Legend: N rows, L routed layers, K = top-k.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sideband.ids import RequestId, RunId
from sideband.masks.rows import MaskRows
from sideband.model import ModelShape
from sideband.payload import ChoicePayload, PayloadReader, PayloadRoot, WriteReport, write_payload
from sideband.payload.columns import RowArray
from sideband.payload.encodings import DEFAULT_ENCODINGS, Encodings
from sideband.segments import PayloadSegment, clip
from sideband.testing.payloads import random_choice

RUN = RunId("run-1")
REQUEST = RequestId("req-1")
NARROW = ModelShape(num_layers=4, layer_ids=(0, 3), top_k=3, id_space=256, vocab_size=5003)
WIDE = ModelShape(num_layers=4, layer_ids=(1, 3), top_k=2, id_space=300, vocab_size=1000)
GAPS = (3, 7, 8)  # positions without routing in the file of ``write_one``


def make_root(path: Path, run_id: RunId = RUN) -> PayloadRoot:
    return PayloadRoot.create(path, run_id, fresh=False)


def write(
    root: PayloadRoot,
    *choices: ChoicePayload,
    model: ModelShape = WIDE,
    request_id: str = REQUEST,
    policy_version: int = 3,
    encodings: Encodings = DEFAULT_ENCODINGS,
) -> WriteReport:
    return write_payload(
        root,
        policy_version=policy_version,
        request_id=RequestId(request_id),
        model=model,
        choices=choices,
        encodings=encodings,
    )


def one_choice(seed: int = 0, *, model: ModelShape = WIDE, choice: int = 0) -> ChoicePayload:
    """10 prompt and 6 completion tokens, routing from position 1 with GAPS, masks."""
    return random_choice(
        np.random.default_rng(seed),
        model,
        prompt_tokens=10,
        completion_tokens=6,
        prompt_start=1,
        choice=choice,
        gaps=GAPS,
    )


def write_one(root: PayloadRoot, seed: int = 0, **options: object) -> WriteReport:
    return write(root, one_choice(seed), **options)  # type: ignore[arg-type]  # the same options


def read_routing(reader: PayloadReader, segment: PayloadSegment) -> RowArray:
    out = np.empty((segment.rows, *segment.shape), segment.dtype)
    reader.read_routing(segment, out)
    return out


def sampled_tokens(choice: ChoicePayload, segment: PayloadSegment) -> NDArray[np.int32]:
    """The tokens that the choice sampled at the segment's positions."""
    assert choice.masks is not None
    first = segment.pos - choice.masks.pos
    return choice.masks.sampled_token_ids_N[first : first + segment.rows]


def rows_read(
    reader: PayloadReader, segments: Iterable[PayloadSegment], choice: ChoicePayload | None = None
) -> dict[int, bytes]:
    """Each position's bytes: of its routing row, or of its kept ids, which ``choice`` sampled."""
    rows: dict[int, bytes] = {}
    for segment in segments:
        data: RowArray | MaskRows
        if segment.field == "routed_experts":
            data = read_routing(reader, segment)
        else:
            assert choice is not None
            data = reader.read_masks(segment, sampled_tokens(choice, segment))
        for index in range(segment.rows):
            assert segment.pos + index not in rows
            rows[segment.pos + index] = data[index].tobytes()
    return rows


def rows_given(choice: ChoicePayload, *, gaps: Iterable[int] = ()) -> dict[str, dict[int, bytes]]:
    """The same out of what was written, by field."""
    given: dict[str, dict[int, bytes]] = {"routed_experts": {}, "sampling_mask": {}}
    if choice.routing is not None:
        for index, row in enumerate(choice.routing.rows_NLK):
            if choice.routing.pos + index not in gaps:
                given["routed_experts"][choice.routing.pos + index] = row.tobytes()
    if choice.masks is not None:
        for index in range(len(choice.masks.masks)):
            if len(choice.masks.masks[index]):  # a row without ids is a gap
                row = choice.masks.masks[index].tobytes()
                given["sampling_mask"][choice.masks.pos + index] = row
    return given


def of_field(segments: Iterable[PayloadSegment], field: str) -> list[PayloadSegment]:
    return [segment for segment in segments if segment.field == field]


def clipped(segments: Iterable[PayloadSegment], start: int, stop: int) -> list[PayloadSegment]:
    return [cut for s in segments if (cut := clip(s, start=start, stop=stop)) is not None]


def file_path(root: PayloadRoot, report: WriteReport) -> Path:
    assert report.file is not None
    return root.path / report.file


def all_files(root: PayloadRoot) -> set[str]:
    """Every file below the root but the marker, by its path."""
    return {
        path.relative_to(root.path).as_posix()
        for path in root.path.rglob("*")
        if not path.is_dir() and path.name != ".sideband-root.json"
    }
