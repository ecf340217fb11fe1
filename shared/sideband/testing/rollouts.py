"""Turns and whole rollouts whose rows tell which turn wrote them. See ``batches``."""

from collections.abc import Iterable, Sequence

import numpy as np
from hypothesis import strategies as st

from sideband.batch.columns import Runs
from sideband.batch.types import Turn
from sideband.ids import RequestId
from sideband.model import ModelShape
from sideband.segments import AnySegment, Form
from sideband.testing.batch_strategies import FORMS
from sideband.testing.batches import WIDE_MODEL, logprobs_of, mask_segment, routing_segment

Ranges = Iterable[tuple[int, int]]


def make_turn(
    serial: int,
    prompt: Sequence[int],
    completion: Sequence[int],
    *,
    form: Form | None = "handle",
    routing: Ranges | None = None,
    masks: Ranges | None = None,
    sampled: Sequence[bool] | None = None,
    temperature: float = 0.7,
    is_truncating: bool = False,
    weight_version: int | None = None,
    advantages: Sequence[float] | None = None,
    model: ModelShape = WIDE_MODEL,
) -> Turn:
    """One turn. Without ranges it has all rows that an engine returns; ``form`` None has none."""
    tokens = len(prompt) + len(completion)
    segments: list[AnySegment] = []
    if form is not None:
        forwarded = tokens - 1 if completion else tokens
        for start, stop in [(0, forwarded)] if routing is None else routing:
            if start < stop:
                segments.append(routing_segment(serial, start, stop, form=form, model=model))
        for start, stop in [(len(prompt), tokens)] if masks is None else masks:
            if start < stop:
                segments.append(mask_segment(serial, start, stop, form=form, model=model))
    versions = np.full(len(completion), weight_version or 0, np.int32)
    return Turn(
        request_id=RequestId(f"request-{serial}"),
        prompt_token_ids_P=np.array(prompt, np.int32),
        completion_token_ids_C=np.array(completion, np.int32),
        logprobs_C=logprobs_of(serial, np.arange(len(prompt), tokens)),
        sampled_C=np.ones(len(completion), np.bool_)
        if sampled is None
        else np.array(sampled, np.bool_),
        temperature=temperature,
        is_truncating=is_truncating,
        segments=tuple(segments),
        weight_versions_C=None if weight_version is None else Runs.of(versions),
        advantages_C=None if advantages is None else np.array(advantages, np.float32),
    )


@st.composite
def rollouts(draw: st.DrawFn, *, turns_max: int = 6) -> list[Turn]:
    """Turns that continue, fork, re-tokenise, abort and lose rows, over three token ids.

    So few ids make accidental shared prefixes frequent. All turns of a rollout have one form.
    """
    form = draw(st.sampled_from(FORMS))
    token = st.integers(0, 2)
    turns: list[Turn] = []
    sequences: list[list[int]] = [[]]
    for serial in range(draw(st.integers(1, turns_max))):
        # mostly the latest sequence, mostly whole: a continued conversation
        past = sequences[draw(st.sampled_from([-1, -1, -1, *range(len(sequences))]))]
        kept = draw(st.sampled_from([len(past), len(past), len(past), len(past) // 2]))
        prompt = [*past[:kept], *draw(st.lists(token, max_size=4))] or [draw(token)]
        completion = draw(st.lists(token, max_size=4))
        sequences.append([*prompt, *completion])
        turns.append(draw(_turns(serial, prompt, completion, form)))
    return turns


@st.composite
def _turns(
    draw: st.DrawFn, serial: int, prompt: list[int], completion: list[int], form: Form
) -> Turn:
    tokens = len(prompt) + len(completion)
    forwarded = tokens - 1 if completion else tokens
    # what a delta request asks for starts anywhere in the prompt; a gap splits it
    start = draw(st.sampled_from([0, len(prompt) - 1, len(prompt) // 2]))
    gap = draw(st.sampled_from([forwarded, forwarded, forwarded, (start + forwarded) // 2]))
    routing = [(start, gap), (gap + 1, forwarded)]
    count = len(completion)
    return make_turn(
        serial,
        prompt,
        completion,
        form=draw(st.sampled_from([form, form, form, None])),
        routing=routing,
        masks=draw(st.sampled_from([None, None, []])),
        sampled=draw(
            st.sampled_from([None, None, None])
            | st.lists(st.booleans(), min_size=count, max_size=count)
        ),
        temperature=draw(st.sampled_from([0.0, 0.5, 1.0])),
        is_truncating=draw(st.booleans()),
        weight_version=draw(st.none() | st.integers(0, 3)),
        advantages=draw(st.none() | st.just([serial + n / 4 for n in range(count)])),
    )
