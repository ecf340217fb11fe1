"""The model: packed rows are separate sequences, a cache changes nothing, replay decides."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

from examples.train_tiny_moe.engine import Sampling, StandInEngine, rows_after
from examples.train_tiny_moe.model import TinyMoe
from examples.train_tiny_moe.rows import CachedKeys, Replay, TokenRows
from examples.train_tiny_moe.weights import (
    WrongWeights,
    load_model,
    resume_point_of,
    save_weights,
)
from sideband import ResumePoint
from tests.examples.support import CONFIG, CONFIG_PATH, Played

pytestmark = pytest.mark.torch

TOKENS = (torch.tensor([5, 900, 17, 3, 3, 44]), torch.tensor([17, 2, 1023, 0]))


def packed() -> TokenRows:
    lengths = [len(tokens) for tokens in TOKENS]
    return TokenRows(
        token_ids_N=torch.cat(TOKENS),
        sequence_N=torch.repeat_interleave(torch.arange(2), torch.tensor(lengths)),
        order_N=torch.arange(sum(lengths)),
        position_N=torch.cat([torch.arange(length) for length in lengths]),
        replay=None,
    )


def test_the_examples_config_is_the_engines() -> None:
    recorded = Path("tests/data/vllm/tiny-moe.config.json")
    assert CONFIG_PATH.read_bytes() == recorded.read_bytes()
    assert CONFIG.shape.layer_ids == (1, 2, 3)


@pytest.mark.usefixtures("without_gradients")
def test_packed_sequences_do_not_see_each_other(played: Played) -> None:
    model = played.model()
    together = model(packed()).logits_NV
    alone = [model(TokenRows.of_sequence(tokens, None)).logits_NV for tokens in TOKENS]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("without_gradients")
def test_a_row_sees_nothing_that_comes_after_it(played: Played) -> None:
    model = played.model()
    whole = model(TokenRows.of_sequence(TOKENS[0], None)).logits_NV
    first = model(TokenRows.of_sequence(TOKENS[0][:3], None)).logits_NV
    torch.testing.assert_close(whole[:3], first, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("without_gradients")
def test_a_cache_of_keys_changes_nothing(played: Played) -> None:
    model, keys = played.model(), CachedKeys()
    whole = model(TokenRows.of_sequence(TOKENS[0], None))
    parts = [
        model(rows_after(start, TOKENS[0][start:stop].tolist()), keys)
        for start, stop in ((0, 3), (3, 4), (4, 6))
    ]
    logits = torch.cat([part.logits_NV for part in parts])
    torch.testing.assert_close(logits, whole.logits_NV, rtol=1e-10, atol=1e-10)
    for layer, ids in whole.experts_NK.items():
        assert torch.equal(torch.cat([part.experts_NK[layer] for part in parts]), ids)


def test_replaying_what_ran_changes_nothing_and_other_experts_do(played: Played) -> None:
    model = played.model()
    own = model(TokenRows.of_sequence(TOKENS[0], None))
    valid = torch.ones(6, dtype=torch.bool)
    same = Replay(experts_NK=own.experts_NK, valid_N=valid)
    torch.testing.assert_close(
        model(TokenRows.of_sequence(TOKENS[0], same)).logits_NV, own.logits_NV
    )
    other = {layer: (ids + 1) % 16 for layer, ids in own.experts_NK.items()}
    replayed = model(TokenRows.of_sequence(TOKENS[0], Replay(experts_NK=other, valid_N=valid)))
    assert all(torch.equal(replayed.experts_NK[layer], other[layer]) for layer in other)
    assert (replayed.logits_NV - own.logits_NV).abs().max() > 1e-3
    unused = Replay(experts_NK=other, valid_N=~valid)
    torch.testing.assert_close(
        model(TokenRows.of_sequence(TOKENS[0], unused)).logits_NV, own.logits_NV
    )


def test_the_router_learns_over_replayed_experts(played: Played) -> None:
    model = played.model()
    ids = torch.arange(4).repeat(6, 1)
    replay = Replay(
        experts_NK=dict.fromkeys(CONFIG.shape.layer_ids, ids),
        valid_N=torch.ones(6, dtype=torch.bool),
    )
    model(TokenRows.of_sequence(TOKENS[0], replay)).logits_NV.logsumexp(-1).sum().backward()
    for layer in CONFIG.shape.layer_ids:
        gradient = model.get_parameter(f"model.layers.{layer}.mlp.gate.weight").grad
        assert gradient is not None
        assert gradient[:4].abs().min() > 1e-9  # each that ran is weighed by the router
        assert gradient[4:].abs().max() < 1e-12  # renormalised over those that ran: no others


def test_weights_come_back_bitwise_and_foreign_ones_are_refused(
    played: Played, tmp_path: Path
) -> None:
    model = played.model(torch.float32)
    (tmp_path / "config.json").write_bytes(CONFIG_PATH.read_bytes())
    save_weights(model, tmp_path / "model.safetensors")
    again = load_model(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    assert resume_point_of(tmp_path) is None
    point = ResumePoint(run_id="run", lineage=1, step=7)
    save_weights(model, tmp_path / "model.safetensors", point=point)
    assert resume_point_of(tmp_path) == point
    assert torch.equal(load_model(tmp_path).state_dict()[name], tensor)
    smaller = TinyMoe(CONFIG)
    del smaller.model.layers[3]
    save_weights(smaller, tmp_path / "model.safetensors")
    with pytest.raises(WrongWeights, match=r"model\.layers\.3"):
        load_model(tmp_path)


def test_the_engine_reports_what_it_did(played: Played) -> None:
    """Equal requests, equal answers; kept sets hold their token; noise moves the experts."""
    sampling = Sampling(tokens_max=5, seed=9)
    engine = StandInEngine(played.model_folder, noise_std=0.1)
    first, again = (engine.answer([1, 2, 3], sampling) for _ in range(2))
    assert first.completion_ids == again.completion_ids
    assert first.logprobs_C == again.logprobs_C
    assert (first.experts_NAK == again.experts_NAK).all()
    assert first.experts_NAK.shape == (7, 4, 4)
    assert not first.experts_NAK[:, 0].any()  # the dense layer
    assert first.kept_C is not None
    for token, logprob, kept in zip(
        first.completion_ids, first.logprobs_C, first.kept_C, strict=True
    ):
        assert token in kept
        assert kept == sorted(set(kept))
        assert len(kept) <= 20
        assert logprob <= 0
    quiet = StandInEngine(played.model_folder, noise_std=0.0)
    other = quiet.answer([1, 2, 3], sampling)
    assert (other.experts_NAK[:3] != first.experts_NAK[:3]).any()
    everything = quiet.answer([1, 2, 3], Sampling(tokens_max=2, seed=9, top_k=0, top_p=1.0))
    assert everything.kept_C is None
