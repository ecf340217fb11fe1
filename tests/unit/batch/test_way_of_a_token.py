"""The whole way, turns to rank rows: every trained token arrives once, with its own row and set."""

from hypothesis import given
from hypothesis import strategies as st

from sideband.batch.chunks import cut_chunk
from sideband.batch.packing import PackingPlan, pack
from sideband.batch.rollouts import check_routing, samples_of, truncate
from sideband.batch.rows import PlacedRows, input_rows_of, rank_rows, sampled_rows_of
from sideband.batch.types import Align, Chunk, Sample, Turn
from sideband.ids import RolloutId
from sideband.testing.batch_strategies import plans
from sideband.testing.batches import WIDE_MODEL, Row, row_at, rows_by_position
from sideband.testing.rollouts import rollouts


def delivered(turns: list[Turn], number: int, *, seq_len: int, keep_rest: bool) -> list[Sample]:
    report = samples_of(
        RolloutId(f"rollout-{number}"),
        turns,
        env_name="env",
        policy_version=0,
        advantage=float(number),
        model=WIDE_MODEL,
    )
    checked = [check_routing(sample, keep_rest=keep_rest)[0] for sample in report.samples]
    return [cut for sample in checked if (cut := truncate(sample, seq_len)) is not None]


def by_row(placed: list[PlacedRows]) -> dict[int, Row]:
    return {
        one.start + n: row_at(one.segment, n) for one in placed for n in range(one.segment.rows)
    }


def arrivals(chunk: Chunk, align: Align) -> dict[tuple[str, int], tuple[object, ...]]:
    """What arrived for token t of a sample, but for its pads."""
    rows = rank_rows(chunk, align)
    routing, masks = (
        by_row(input_rows_of(chunk, "routed_experts")),
        by_row(sampled_rows_of(chunk, "sampling_mask", align)),
    )
    arrived: dict[tuple[str, int], tuple[object, ...]] = {}
    for n, position in enumerate(rows.positions_N.tolist()):
        span = next(s for s in chunk.spans if s.start <= position < s.stop)
        if span.sample_id is None or position >= span.start + span.length:
            assert (rows.loss_mask_N[n], n in routing, n in masks) == (False, False, False)
            continue
        arrived[span.sample_id, position - span.start] = (
            int(rows.input_ids_N[n]),
            routing.get(n),
            int(rows.labels_N[n]),
            bool(rows.loss_mask_N[n]),
            float(rows.logprobs_N[n]),
            float(rows.advantages_N[n]),
            float(rows.temperatures_N[n]),
            masks.get(n),
        )
    return arrived


def expected(sample: Sample, align: Align) -> dict[tuple[str, int], tuple[object, ...]]:
    routing = rows_by_position(sample.segments, "routed_experts")
    masks = rows_by_position(sample.segments, "sampling_mask")
    tokens = sample.token_ids_T.tolist()
    advantages = sample.advantages.expand().tolist()
    temperatures = sample.temperatures.expand().tolist()
    rows: dict[tuple[str, int], tuple[object, ...]] = {}
    for t, token in enumerate(tokens):
        at = t + 1 if align == "next" else t
        if at == len(tokens):
            told: tuple[object, ...] = (-100, False, 0.0, 0.0, 1.0, None)
        else:
            told = (
                tokens[at],
                bool(sample.loss_mask_T[at]),
                float(sample.logprobs_T[at]),
                advantages[at],
                temperatures[at],
                masks.get(at),
            )
        rows[sample.sample_id, t] = (token, routing.get(t), *told)
    return rows


@given(
    st.lists(rollouts(turns_max=4), min_size=1, max_size=4),
    plans(seq_len_min=8, cp_size_max=4),
    st.sampled_from(["next", "token"]),
    st.booleans(),
)
def test_each_token_arrives_at_one_rank_with_all_that_belongs_to_it(
    delivered_turns: list[list[Turn]], plan: PackingPlan, align: Align, keep_rest: bool
) -> None:
    samples = [
        sample
        for number, turns in enumerate(delivered_turns)
        for sample in delivered(turns, number, seq_len=plan.seq_len, keep_rest=keep_rest)
    ]
    arrived: dict[tuple[str, int], tuple[object, ...]] = {}
    for micro_batch in [m for rank in pack(samples, plan) for m in rank]:
        for cp_rank in range(plan.cp_size):
            chunk = cut_chunk(
                micro_batch, cp_rank=cp_rank, cp_size=plan.cp_size, layout=plan.layout
            )
            of_rank = arrivals(chunk, align)
            assert not of_rank.keys() & arrived.keys()
            arrived |= of_rank
    wanted: dict[tuple[str, int], tuple[object, ...]] = {}
    for sample in samples:
        wanted |= expected(sample, align)
    assert arrived == wanted
    trained = sum(1 for told in arrived.values() if told[3])
    assert trained == sum(int(sample.loss_mask_T.sum()) for sample in samples)
