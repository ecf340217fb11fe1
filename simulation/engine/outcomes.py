"""What one request yields: tokens, the rows an engine of this role would report, masks. Pure.

Legend: C completion tokens, N rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sideband.masks.rows import MaskRows, ScoreRows
from sideband.routing.rows import RowArray
from simulation.engine.wire import SamplingParams
from simulation.truth import Sampling, Truth, mix


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """How the engine comes to run a request.

    ``loaded_tokens`` leading prompt tokens came from another engine: rows reported for them are
    garbage unless the request was preempted and prefilled again here.
    """

    loaded_tokens: int
    was_preempted: bool
    rows_start: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """One choice. Row i of ``routing_NLK`` claims position ``rows_start + i``."""

    index: int
    prompt_tokens: int
    token_ids_C: NDArray[np.int32]
    finish_reason: str
    stop_reason: int | None
    rows_start: int
    routing_NLK: RowArray
    masks: MaskRows
    scores: ScoreRows | None
    logprobs_C: NDArray[np.float32]


def draws(key: int, *, salt: int, rate: float) -> bool:
    """Whether an event of this rate happens to the request with this key."""
    return mix(key ^ mix(salt)) % 1_000_000 < rate * 1_000_000


def choose_tokens(
    truth: Truth, prompt_ids: Sequence[int], params: SamplingParams, *, index: int, seed: int
) -> list[int]:
    """The completion of choice ``index``."""
    sampling = Sampling(
        seed=mix(seed + index),
        top_k=effective_top_k(params, truth.model.vocab_size),
        tokens_max=params.max_tokens,
        tokens_min=params.min_tokens,
        stop_token_ids=frozenset(params.stop_token_ids),
        ignores_eos=params.ignore_eos,
    )
    return truth.sample(prompt_ids, sampling)


def effective_top_k(params: SamplingParams, vocab_size: int) -> int:
    """How many ids sampling may keep: one when greedy, all when nothing filters."""
    if params.temperature == 0:
        return 1
    return params.top_k if params.top_k > 0 else vocab_size


def observe(
    truth: Truth,
    prompt_ids: Sequence[int],
    completion: Sequence[int],
    params: SamplingParams,
    *,
    index: int,
    course: Course,
) -> Outcome:
    """Everything the engine reports about one finished choice.

    Rows end before the last sampled token: it has not been forwarded.
    """
    token_ids = np.array([*prompt_ids, *completion], np.int32)
    prompt_tokens, start, stop = len(prompt_ids), course.rows_start, len(token_ids) - 1
    routing = truth.routing(token_ids, start, stop)
    garbage_rows = min(course.loaded_tokens, stop) - start
    if garbage_rows > 0 and not course.was_preempted:
        foreign = Truth(truth.model, seed=mix(truth.seed ^ index ^ len(token_ids)))
        routing[:garbage_rows] = foreign.routing(token_ids, start, start + garbage_rows)
    top_k = effective_top_k(params, truth.model.vocab_size)
    is_stopped = len(completion) < params.max_tokens or _is_stop(truth, completion[-1], params)
    return Outcome(
        index=index,
        prompt_tokens=prompt_tokens,
        token_ids_C=token_ids[prompt_tokens:],
        finish_reason="stop" if is_stopped else "length",
        stop_reason=completion[-1] if completion[-1] in params.stop_token_ids else None,
        rows_start=start,
        routing_NLK=routing,
        masks=truth.masks(token_ids, prompt_tokens, top_k=top_k),
        scores=truth.scores(token_ids, prompt_tokens, top_k=top_k) if params.asks_scores else None,
        logprobs_C=truth.logprobs(token_ids, prompt_tokens),
    )


def _is_stop(truth: Truth, token: int, params: SamplingParams) -> bool:
    is_eos = token == truth.eos_token_id and not params.ignore_eos
    return is_eos or token in params.stop_token_ids
