"""The loss, and how far the trainer's log-probabilities are from the engine's.

Both are sums over trained tokens, so that micro batches and ranks can be added up; what divides
them is the number of trained tokens of the whole step.

Legend: N rows of tokens.
"""

from dataclasses import dataclass
from typing import Self

import torch


def policy_loss(
    logprobs_N: torch.Tensor,
    sampled_N: torch.Tensor,
    advantages_N: torch.Tensor,
    is_trained_N: torch.Tensor,
) -> torch.Tensor:
    """The sum of −ratio × advantage: ratio is the trainer's probability over the engine's.

    A micro batch without a trained token gives 0 with a gradient of zeros: all ranks of a group go
    through the same collectives, whatever their rows hold.
    """
    ratio_N = torch.exp(torch.where(is_trained_N, logprobs_N - sampled_N, 0))
    return -torch.where(is_trained_N, ratio_N * advantages_N, 0).sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Sums over tokens: |Δ| of the log-probabilities, and the k3 estimate of KL(engine ‖ trainer).

    With Δ = trainer − engine on tokens that the engine drew, k3 = exp(Δ) − 1 − Δ is never negative
    and its mean has the divergence as its expectation. ``divergence`` is that divergence over the
    kept ids themselves, on the ``scored`` tokens whose kept ids came with the engine's logprobs.
    """

    tokens: int
    distance: float
    k3: float
    scored: int = 0
    divergence: float = 0.0

    @classmethod
    def of(
        cls, logprobs_N: torch.Tensor, sampled_N: torch.Tensor, is_trained_N: torch.Tensor
    ) -> Self:
        """Over the trained rows."""
        delta = (logprobs_N - sampled_N).detach().double()[is_trained_N]
        return cls(
            tokens=len(delta),
            distance=float(delta.abs().sum()),
            k3=float((torch.expm1(delta) - delta).sum()),
        )

    def __add__(self, other: "Mismatch") -> "Mismatch":
        return Mismatch(
            tokens=self.tokens + other.tokens,
            distance=self.distance + other.distance,
            k3=self.k3 + other.k3,
            scored=self.scored + other.scored,
            divergence=self.divergence + other.divergence,
        )

    @property
    def mean_distance(self) -> float:
        """Nats per token."""
        return self.distance / max(1, self.tokens)

    @property
    def mean_divergence(self) -> float | None:
        """Nats per scored token; None without any."""
        return self.divergence / self.scored if self.scored else None

    @property
    def mean_k3(self) -> float:
        """Nats per token."""
        return self.k3 / max(1, self.tokens)


NO_TOKENS = Mismatch(tokens=0, distance=0.0, k3=0.0)
