"""What the writer refuses, by name and with the facts; nothing of it reaches the disk."""

from collections.abc import Callable

import numpy as np
import pytest

from sideband.errors import InvalidId, InvalidInput
from sideband.masks.rows import MaskRows
from sideband.model import ModelShape
from sideband.payload import (
    ChoicePayload,
    MaskColumn,
    PayloadError,
    PayloadRoot,
    RoutingRows,
    assembly,
    encodings,
    errors,
    refusals,
)
from sideband.payload.columns import RowArray
from sideband.segments import POSITION_MAX
from sideband.testing.payloads import random_choice, random_routing
from tests.unit.payload.support import WIDE, all_files, one_choice, write

NO_REPLAY = np.zeros(0, np.int32)


def routing(rows_NLK: RowArray, pos: int = 0) -> ChoicePayload:
    return ChoicePayload(choice=0, routing=RoutingRows(pos=pos, rows_NLK=rows_NLK), masks=None)


def masks(
    kept: list[list[int]], sampled: list[int], *, pos: int = 10, starts: list[int] | None = None
) -> ChoicePayload:
    places = np.array(starts, np.int64) if starts else np.cumsum([0, *map(len, kept)])
    ids = [token_id for row in kept for token_id in row]
    column = MaskColumn(
        pos=pos,
        masks=MaskRows(places.astype(np.int64), np.array(ids, np.int32)),
        sampled_token_ids_N=np.array(sampled, np.int32),
    )
    return ChoicePayload(choice=0, routing=None, masks=column)


def rows(count: int = 3) -> RowArray:
    return random_routing(np.random.default_rng(1), count, WIDE)


def with_id(expert_id: int, *, row: int) -> RowArray:
    changed = rows(6)
    changed[row, 1, 0] = expert_id
    return changed


WRONG: list[tuple[str, Callable[[], ChoicePayload], type[PayloadError], dict[str, object]]] = [
    ("layers", lambda: routing(np.zeros((3, 1, 2), np.uint16)), refusals.WrongRowShape, {}),
    ("top-k", lambda: routing(np.zeros((3, 2, 3), np.uint16)), refusals.WrongRowShape, {}),
    ("two dimensions", lambda: routing(np.zeros((3, 4), np.uint16)), refusals.WrongRowShape, {}),
    ("no dimension", lambda: routing(np.zeros((), np.uint16)), refusals.WrongRowShape, {}),
    ("dtype", lambda: routing(np.zeros((3, 2, 2), np.uint8)), refusals.WrongRowShape, {}),
    (
        "big-endian",
        lambda: routing(rows().astype(">u2")),
        refusals.WrongRowShape,
        {},
    ),
    ("before 0", lambda: routing(rows(), pos=-1), refusals.WrongRowShape, {}),
    ("beyond int32", lambda: routing(rows(), pos=POSITION_MAX - 2), refusals.WrongRowShape, {}),
    (
        "an expert id",
        lambda: routing(with_id(300, row=4), pos=20),
        refusals.IdOutOfRange,
        {"pos": 24, "expert_id": 300, "id_space": 300},
    ),
    (
        "the largest number",
        lambda: routing(with_id(65535, row=0)),
        refusals.IdOutOfRange,
        {"pos": 0, "expert_id": 65535},
    ),
    (
        "starts beyond the ids",
        lambda: masks([[5]], [5], starts=[0, 2]),
        refusals.MalformedMask,
        {},
    ),
    (
        "starts that run backwards",
        lambda: masks([[5, 6]], [5, 6, 6], starts=[0, 2, 1, 2]),
        refusals.MalformedMask,
        {},
    ),
    ("a token too few", lambda: masks([[5], [6]], [5]), refusals.MalformedMask, {}),
    ("a token too many", lambda: masks([[5]], [5, 6]), refusals.MalformedMask, {}),
    ("masks before 0", lambda: masks([[5]], [5], pos=-1), refusals.WrongRowShape, {}),
    (
        "a negative kept id",
        lambda: masks([[5], [-1, 6]], [5, 6]),
        refusals.VocabularyIdOutOfRange,
        {"pos": 11, "token_id": -1, "vocab_size": 1000},
    ),
    (
        "a kept id beyond",
        lambda: masks([[], [5], [6, 1000]], [0, 5, 6]),
        refusals.VocabularyIdOutOfRange,
        {"pos": 12, "token_id": 1000},
    ),
    ("ids that descend", lambda: masks([[5], [7, 6]], [5, 6]), refusals.UnsortedMask, {"pos": 11}),
    ("ids that repeat", lambda: masks([[6, 6]], [6]), refusals.UnsortedMask, {"pos": 10}),
    (
        "a token outside its set",
        lambda: masks([[], [5], [6, 8]], [9, 5, 7]),
        refusals.SampledTokenNotKept,
        {"pos": 12, "token_id": 7},
    ),
]


@pytest.mark.parametrize(
    ("make", "error", "facts"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG]
)
def test_wrong_rows_are_refused_by_name(
    root: PayloadRoot,
    make: Callable[[], ChoicePayload],
    error: type[PayloadError],
    facts: dict[str, object],
) -> None:
    good = one_choice(choice=1)
    with pytest.raises(PayloadError) as caught:
        write(root, good, make())
    assert type(caught.value) is error, caught.value
    assert {name: getattr(caught.value, name) for name in facts} == facts
    assert not caught.value.is_retryable
    assert all_files(root) == set()


def test_an_id_outside_is_loud_even_in_a_row_that_would_be_a_gap(root: PayloadRoot) -> None:
    changed = rows()
    changed[1, :, :] = 301
    with pytest.raises(refusals.IdOutOfRange):
        write(root, routing(changed))


def test_the_dtype_is_wide_enough_or_every_id_is_looked_at(root: PayloadRoot) -> None:
    full = ModelShape(num_layers=1, layer_ids=(0,), top_k=2, id_space=256, vocab_size=10)
    ids = np.array([[[255, 0]]], np.uint8)
    assert write(root, routing(ids), model=full).rows_invalid == 0
    narrow = ModelShape(num_layers=1, layer_ids=(0,), top_k=2, id_space=255, vocab_size=10)
    with pytest.raises(refusals.IdOutOfRange):
        write(root, routing(ids), model=narrow)


def test_a_token_of_a_row_without_ids_is_not_looked_for(root: PayloadRoot) -> None:
    report = write(root, masks([[], [3]], [-1, 3]))
    assert [(segment.pos, segment.rows) for segment in report.segments[0]] == [(11, 1)]


def test_the_same_choice_twice(root: PayloadRoot) -> None:
    with pytest.raises(refusals.DuplicateChoice) as caught:
        write(root, one_choice(choice=2), one_choice(choice=2))
    assert caught.value.choice == 2
    assert all_files(root) == set()


@pytest.mark.parametrize("choice", [-1, 1 << 40])
def test_a_choice_that_cannot_be(root: PayloadRoot, choice: int) -> None:
    with pytest.raises(InvalidInput, match="choice"):
        write(root, one_choice(choice=choice))


@pytest.mark.parametrize("request_id", ["", "..", "a/b", "a\nb", "x" * 129, "ä"])
def test_a_request_id_that_cannot_be(root: PayloadRoot, request_id: str) -> None:
    with pytest.raises(InvalidId):
        write(root, one_choice(), request_id=request_id)
    assert all_files(root) == set()


def test_the_longest_request_id_fits_a_name(root: PayloadRoot) -> None:
    report = write(root, one_choice(), request_id="x" * 128)
    assert report.file is not None
    assert root.size(report.file) == report.size_bytes


def test_a_model_that_cannot_be(root: PayloadRoot) -> None:
    model = ModelShape(num_layers=1, layer_ids=(1,), top_k=2, id_space=256, vocab_size=10)
    with pytest.raises(InvalidInput, match="layer_ids"):
        write(root, one_choice(), model=model)


def test_more_gaps_than_a_header_holds(root: PayloadRoot) -> None:
    model = ModelShape(num_layers=1, layer_ids=(0,), top_k=2, id_space=256, vocab_size=10)
    alternating = random_routing(np.random.default_rng(0), 200_000, model)
    alternating[::2] = 0
    with pytest.raises(errors.HeaderTooLarge, match="header bytes"):
        write(root, routing(alternating), model=model)
    assert all_files(root) == set()


def test_more_empty_kept_sets_than_a_header_holds(root: PayloadRoot) -> None:
    kept: list[list[int]] = [[], [3]] * 100_000
    with pytest.raises(errors.HeaderTooLarge, match="header bytes"):
        write(root, masks(kept, [3] * len(kept)))
    assert all_files(root) == set()


def test_more_blocks_than_an_index_holds(
    root: PayloadRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sideband.payload.header.BLOCKS_MAX", 4)
    monkeypatch.setattr(encodings, "BLOCK_BYTES_TARGET", 1)
    with pytest.raises(errors.HeaderTooLarge, match="blocks"):
        write(root, routing(rows(5)))
    write(root, routing(rows(4)))


def test_a_block_over_its_limit(root: PayloadRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "BLOCK_BYTES_MAX", 15)
    with pytest.raises(errors.HeaderTooLarge, match="block bytes"):
        write(root, routing(rows(2)))


def test_random_rows_of_the_library_are_never_refused(root: PayloadRoot) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        choice = random_choice(rng, WIDE, prompt_tokens=3, completion_tokens=20)
        assert write(root, choice).rows_invalid == 0
