"""Hypothesis strategies for samples, plans and packed rows."""

from hypothesis import strategies as st

from sideband.batch.packing import PackingPlan
from sideband.batch.types import Layout, Sample
from sideband.model import ModelShape
from sideband.segments import Form
from sideband.testing.batches import NARROW_MODEL, WIDE_MODEL, make_sample

LAYOUTS: tuple[Layout, ...] = ("contiguous", "zigzag")
FORMS: tuple[Form, ...] = ("inline", "handle")


@st.composite
def samples(
    draw: st.DrawFn,
    *,
    serial: int,
    tokens_max: int = 40,
    forms: tuple[Form | None, ...] = (*FORMS, None),
    models: tuple[ModelShape, ...] = (WIDE_MODEL, NARROW_MODEL),
) -> Sample:
    """A sample with random length, breaks and gaps."""
    tokens = draw(st.integers(2, tokens_max))
    position = st.integers(0, tokens - 1)
    return make_sample(
        serial,
        tokens=tokens,
        prompt_tokens=draw(st.integers(1, tokens - 1)),
        form=draw(st.sampled_from(forms)),
        with_masks=draw(st.booleans()),
        with_scores=draw(st.booleans()),
        with_weight_versions=draw(st.booleans()),
        model=draw(st.sampled_from(models)),
        breaks=draw(st.lists(position, max_size=3)),
        gaps=draw(st.lists(st.tuples(position, position), max_size=2)),
    )


@st.composite
def sample_lists(
    draw: st.DrawFn,
    *,
    tokens_max: int = 40,
    min_size: int = 0,
    max_size: int = 12,
    forms: tuple[Form | None, ...] = (*FORMS, None),
    models: tuple[ModelShape, ...] = (WIDE_MODEL, NARROW_MODEL),
) -> list[Sample]:
    """Samples with different serials, hence different contents; some lists of short ones only."""
    count = draw(st.integers(min_size, max_size))
    tokens_max = draw(st.sampled_from([min(8, tokens_max), tokens_max]))
    return [
        draw(samples(serial=serial, tokens_max=tokens_max, forms=forms, models=models))
        for serial in range(count)
    ]


@st.composite
def plans(draw: st.DrawFn, *, seq_len_min: int = 40, cp_size_max: int = 8) -> PackingPlan:
    """A plan whose rows hold at least ``seq_len_min`` tokens."""
    layout = draw(st.sampled_from(LAYOUTS))
    cp_size = draw(st.integers(1, cp_size_max))
    pad_multiple = draw(st.integers(1, 3))
    multiple = cp_size * pad_multiple * (2 if layout == "zigzag" else 1)
    rows = draw(st.integers(-(-seq_len_min // multiple), -(-seq_len_min // multiple) + 6))
    return PackingPlan(
        seq_len=rows * multiple,
        dp_size=draw(st.integers(1, 4)),
        cp_size=cp_size,
        layout=layout,
        pad_multiple=pad_multiple,
    )
