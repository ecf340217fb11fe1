"""What the orchestrator packs and the feed cuts. Pure data; no I/O.

Legend: T tokens of one sample, L tokens of a packed row (padded), N tokens of one rank's chunk.

Alignment by token (SPEC section 10): ``logprobs[t]``, ``loss_mask[t]``, ``advantages[t]``,
``temperatures[t]`` and mask row t are about token t being sampled after tokens < t; routing row t
is what ran when token t was the *input*.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sideband.batch.columns import Runs
from sideband.ids import RequestId, RolloutId, SampleId
from sideband.segments import AnySegment, Form

Layout = Literal["contiguous", "zigzag"]
Align = Literal["next", "token"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """One delivered request of a rollout: P prompt and C completion tokens.

    ``segments`` are in the turn's own positions [0, P + C), both fields. ``sampled_C`` is False for
    completion tokens that must not train. ``is_truncating``: the sampling cut the vocabulary
    (top-p < 1 or top-k set), so that a missing mask is a fault.
    """

    request_id: RequestId
    prompt_token_ids_P: NDArray[np.int32]
    completion_token_ids_C: NDArray[np.int32]
    logprobs_C: NDArray[np.float32]
    sampled_C: NDArray[np.bool_]
    temperature: float
    is_truncating: bool
    segments: tuple[AnySegment, ...]
    weight_versions_C: Runs | None = None
    advantages_C: NDArray[np.float32] | None = None  # per token, where the client gives them


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One branch of a rollout as a flat token sequence.

    ``segments`` lie in its positions, disjoint per field. ``form`` is None when the sample
    has no segments at all. ``weight_versions`` is -1 where unknown.
    """

    sample_id: SampleId
    rollout_id: RolloutId
    env_name: str
    policy_version: int
    token_ids_T: NDArray[np.int32]
    loss_mask_T: NDArray[np.bool_]
    logprobs_T: NDArray[np.float32]
    advantages: Runs
    temperatures: Runs
    weight_versions: Runs | None
    segments: tuple[AnySegment, ...]
    form: Form | None

    def __len__(self) -> int:
        return len(self.token_ids_T)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpan:
    """One sequence in a packed row: padded positions [start, stop), the first ``length`` real.

    Padding at the row's end is a span of its own with ``length`` 0 and no sample.
    """

    start: int
    stop: int
    length: int
    sample_id: SampleId | None
    env_name: str
    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Packed samples [1, L]. Spans tile [0, L).

    Segments lie in packed positions, disjoint per field. On pads: token id 0,
    loss mask False, logprob 0, and no segments. A dummy has no real sequence.
    """

    token_ids_L: NDArray[np.int32]
    loss_mask_L: NDArray[np.bool_]
    logprobs_L: NDArray[np.float32]
    advantages: Runs
    temperatures: Runs
    weight_versions: Runs | None
    spans: tuple[SequenceSpan, ...]
    segments: tuple[AnySegment, ...]
    form: Form | None

    def __len__(self) -> int:
        return len(self.token_ids_L)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Packed positions [start, stop) of one CP rank; with ``has_edge`` token ``stop`` travels too.

    The edge token exists when ``stop`` lies strictly inside a sequence: labels and masks of the
    last row need it.
    """

    start: int
    stop: int
    has_edge: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunk:
    """What travels to one CP rank.

    Arrays hold each piece's tokens followed by its edge token: E in all.
    ``segments`` stay in packed positions: routing cut to the pieces, masks to pieces plus edges.
    ``spans`` are the global ones.
    """

    row_tokens: int  # L of the whole packed row
    pieces: tuple[Piece, ...]
    token_ids_E: NDArray[np.int32]
    loss_mask_E: NDArray[np.bool_]
    logprobs_E: NDArray[np.float32]
    advantages: Runs
    temperatures: Runs
    weight_versions: Runs | None
    spans: tuple[SequenceSpan, ...]
    segments: tuple[AnySegment, ...]
    form: Form | None
