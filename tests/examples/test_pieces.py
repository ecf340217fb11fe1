"""Log-probabilities over kept sets, the loss, the mismatch: against the formula, row by row."""

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

from examples.train_tiny_moe.comparison import difference
from examples.train_tiny_moe.logprobs import kept_divergence, kept_logprobs
from examples.train_tiny_moe.loss import NO_TOKENS, Mismatch, policy_loss

pytestmark = pytest.mark.torch

KEPT: tuple[list[int], ...] = ([3], [], [0, 2, 5, 7], list(range(8)), [1, 6])
LABELS = (3, 4, 5, 0, 6)
TEMPERATURES = (1.0, 0.5, 2.0, 1.0, 0.25)


def tensors(scale: float) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, 8, generator=generator, dtype=torch.float64) * scale
    counts = torch.tensor([0, *(len(row) for row in KEPT)])
    ids = torch.tensor([each for row in KEPT for each in row], dtype=torch.int64)
    temperatures = torch.tensor(TEMPERATURES, dtype=torch.float64)
    return logits.requires_grad_(), torch.tensor(LABELS), temperatures, counts.cumsum(0), ids


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_a_label_is_weighed_against_its_own_kept_ids_only(scale: float) -> None:
    logits, *others = tensors(scale)
    found = kept_logprobs(logits, *others)
    expected = []
    for row, (label, temperature, kept) in enumerate(zip(LABELS, TEMPERATURES, KEPT, strict=True)):
        scaled = logits[row] / temperature
        expected.append(scaled[label] - torch.logsumexp(scaled[kept] if kept else scaled, 0))
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-12, atol=1e-12)
    assert float(found[0].detach()) == 0  # one id kept: the sampling had no choice
    (ours,) = torch.autograd.grad(found.sum(), logits, retain_graph=True)
    (theirs,) = torch.autograd.grad(torch.stack(expected).sum(), logits)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert not ours[0].any()  # and nothing to learn
    assert not ours[2][[1, 3, 4, 6]].any()  # what was not kept gets no gradient


def test_the_divergence_is_that_of_the_two_distributions_over_the_kept_ids() -> None:
    logits, _, temperatures, starts, ids = tensors(1.0)
    scores = torch.full((len(ids),), torch.nan)
    engine = {2: [0.5, 0.25, 0.25, 0.0], 4: [0.75, 0.25]}  # the other rows were not reported
    for row, probs in engine.items():
        scores[starts[row] : starts[row + 1]] = torch.tensor(probs).log()
    found, is_reported = kept_divergence(logits.detach(), temperatures, starts, ids, scores)
    assert is_reported.tolist() == [row in engine for row in range(5)]
    for row, probs in engine.items():
        ours = torch.softmax(logits.detach()[row] / temperatures[row], 0)[list(KEPT[row])]
        ours = (ours / ours.sum()).tolist()
        expected = sum(q * math.log(q / p) for q, p in zip(probs, ours, strict=True) if q)
        assert float(found[row]) == pytest.approx(expected, rel=1e-6)
    assert not found[[0, 1, 3]].any()


def test_the_loss_is_the_ratio_times_the_advantage_on_trained_rows() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    sampled = torch.tensor([-1.5, -2.0, 0.0])
    advantages = torch.tensor([2.0, -1.0, torch.nan])
    loss = policy_loss(logprobs, sampled, advantages, torch.tensor([True, True, False]))
    assert float(loss.detach()) == pytest.approx(-(math.exp(0.5) * 2 - 1))
    loss.backward()  # type: ignore[no-untyped-call]  # torch's own
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor([-2 * math.exp(0.5), 1.0, 0.0]))


def test_a_micro_batch_without_trained_rows_has_a_gradient_of_zeros() -> None:
    logprobs = torch.tensor([-800.0, 0.0], requires_grad=True)
    loss = policy_loss(logprobs, torch.zeros(2), torch.ones(2), torch.zeros(2, dtype=torch.bool))
    loss.backward()  # type: ignore[no-untyped-call]  # torch's own
    assert float(loss.detach()) == 0
    assert logprobs.grad is not None
    assert not logprobs.grad.any()


def test_mismatch_adds_up_and_its_divergence_is_never_negative() -> None:
    ours, engine = torch.tensor([-1.0, -2.0, -9.0]), torch.tensor([-1.5, -1.0, 0.0])
    both = Mismatch.of(ours, engine, torch.tensor([True, True, False]))
    assert both.tokens == 2
    assert both.mean_distance == pytest.approx(0.75)
    assert both.mean_k3 == pytest.approx((math.expm1(0.5) - 0.5 + math.expm1(-1) + 1) / 2)
    parts = [Mismatch.of(ours, engine, torch.arange(3) == i) for i in range(2)]
    assert parts[0] + parts[1] == both
    assert all(part.k3 > 0 for part in parts)
    assert NO_TOKENS.mean_distance == NO_TOKENS.mean_k3 == 0


def test_a_difference_is_relative_and_sees_what_is_not_a_number() -> None:
    plain = {"a": torch.tensor([1.0, 100.0]), "b": torch.zeros(2)}
    near = {"a": torch.tensor([1.0, 100.0005]), "b": torch.zeros(2)}
    found = difference(near, plain, our_loss=2.0, plain_loss=2.0, rtol=1e-5)
    assert (found.outside, found.elements, found.parameters) == (0, 4, 2)
    assert found.gradients == pytest.approx(5e-6, rel=0.1)
    lost = {"a": torch.tensor([1.1, torch.nan]), "b": torch.tensor([0.0, 1e-6])}
    found = difference(lost, plain, our_loss=2.2, plain_loss=2.0, rtol=1e-5)
    assert found.outside == 3
    assert found.loss == pytest.approx(0.1)
    assert (found.gradients, found.worst) == (math.inf, "a")
    with pytest.raises(KeyError):
        difference({"a": plain["a"]}, plain, our_loss=0, plain_loss=0, rtol=1e-5)
