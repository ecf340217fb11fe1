"""A stand-in for the engine: the same model in bfloat16, with a router that is a little off.

A real engine's kernels round differently from a trainer's, so that now and then another expert
wins: here seeded noise on the router does it. What ran, what sampling kept, and the logprobs are
reported as vLLM does in its answers (docs of the engine's JSON are in the proxy's dialects).

Legend: T tokens, C completion tokens, A all decoder layers, K experts, V vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from examples.train_tiny_moe.model import Experts, TinyMoe
from examples.train_tiny_moe.rows import CachedKeys, TokenRows
from examples.train_tiny_moe.weights import load_model, load_weights
from sideband import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a request samples. ``top_k`` 0 and ``top_p`` 1 keep everything: then no kept sets."""

    tokens_max: int
    seed: int
    temperature: float = 1.0
    top_k: int = 20
    top_p: float = 0.9

    @property
    def is_truncating(self) -> bool:
        """Whether kept sets are reported."""
        return self.top_k > 0 or self.top_p < 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """Completion, its logprobs as float32 gives them, rows of all but the last token, kept ids and
    the logprob of each of them."""

    completion_ids: list[int]
    logprobs_C: list[float]
    experts_NAK: NDArray[np.uint8]
    kept_C: list[list[int]] | None
    scores_C: list[list[float]] | None


class NoisyRouter(torch.nn.Linear):
    """A router's logits with seeded noise: each token is forwarded once, in order."""

    def __init__(self, router: torch.nn.Linear, *, noise_std: float) -> None:
        super().__init__(router.in_features, router.out_features, bias=False)
        self.weight, self.noise_std = router.weight, noise_std
        self.generator = torch.Generator()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """As the router's."""
        logits = super().forward(hidden)
        noise = torch.randn(logits.shape, generator=self.generator) * self.noise_std
        return logits + noise.to(logits.dtype)


class StandInEngine:
    """Answers one request after the other. Equal requests and weights give equal answers."""

    def __init__(self, model_folder: Path, *, noise_std: float) -> None:
        self._model, self._noise_std = load_model(model_folder, dtype=torch.bfloat16), noise_std
        self._routers = add_noise(self._model, noise_std=noise_std)

    @property
    def shape(self) -> ModelShape:
        """The fingerprint of what is served."""
        return self._model.config.shape

    def load(self, weights: Path) -> None:
        """Take over trained weights, rounded to bfloat16."""
        self._model = load_weights(TinyMoe(self._model.config), [weights]).to(torch.bfloat16)
        self._routers = add_noise(self._model, noise_std=self._noise_std)

    @torch.no_grad()
    def answer(self, prompt_ids: list[int], sampling: Sampling) -> Answer:
        """Prefill, then one token at a time from a cache of keys."""
        generator = torch.Generator().manual_seed(sampling.seed)
        for number, router in enumerate(self._routers):
            router.generator.manual_seed(sampling.seed + number)
        keys = CachedKeys()
        completion: list[int] = []
        logprobs: list[float] = []
        kept: list[list[int]] = []
        scores: list[list[float]] = []
        experts: list[NDArray[np.uint8]] = []
        forwarded, pending = 0, list(prompt_ids)
        while len(completion) < sampling.tokens_max:
            rows = rows_after(forwarded, pending)
            ran = self._model(rows, keys)
            experts.append(self._all_layers(ran.experts_NK, len(pending)))
            forwarded += len(pending)
            token, kept_ids, kept_scores = draw(ran.logits_NV[-1], sampling, generator)
            completion.append(token)
            logprobs.append(kept_scores[kept_ids.index(token)])
            kept.append(kept_ids)
            scores.append(kept_scores)
            pending = [token]
        return Answer(
            completion_ids=completion,
            logprobs_C=logprobs,
            experts_NAK=np.concatenate(experts),
            kept_C=kept if sampling.is_truncating else None,
            scores_C=scores if sampling.is_truncating else None,
        )

    def _all_layers(self, experts_NK: dict[int, torch.Tensor], rows: int) -> NDArray[np.uint8]:
        """[rows, A, K]: zeros in layers without a router, as engines leave them."""
        config = self._model.config
        out: NDArray[np.uint8] = np.zeros((rows, config.num_layers, config.shape.top_k), np.uint8)
        for layer, ids_NK in experts_NK.items():
            out[:, layer] = ids_NK.numpy()
        return out


def add_noise(model: TinyMoe, *, noise_std: float) -> list[NoisyRouter]:
    """Wrap every router of a model; returns them in the order of the layers."""
    routers = []
    for layer in model.model.layers:
        if isinstance(layer.mlp, Experts):
            router = NoisyRouter(layer.mlp.gate, noise_std=noise_std)
            layer.mlp.gate = router
            routers.append(router)
    return routers


def rows_after(start: int, token_ids: list[int]) -> TokenRows:
    """The next tokens of a sequence of which ``start`` are in the cache."""
    places = torch.arange(start, start + len(token_ids))
    return TokenRows(
        token_ids_N=torch.tensor(token_ids),
        sequence_N=torch.zeros_like(places),
        order_N=places,
        position_N=places,
        replay=None,
    )


def draw(
    logits_V: torch.Tensor, sampling: Sampling, generator: torch.Generator
) -> tuple[int, list[int], list[float]]:
    """One token, the kept ids, ascending, and the logprob of each of them (float32)."""
    scaled_V = logits_V.float() / sampling.temperature
    kept = kept_ids(scaled_V, sampling)
    logprobs = torch.log_softmax(scaled_V[kept], 0)
    chosen = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
    return int(kept[chosen]), kept.tolist(), logprobs.tolist()


def kept_ids(scaled_V: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The ids that top-k, then top-p keep: the fewest likely ones that reach ``top_p``."""
    count = sampling.top_k or len(scaled_V)
    values, ids = torch.topk(scaled_V, min(count, len(scaled_V)))
    probs = torch.softmax(values, 0)
    before = torch.cumsum(probs, 0) - probs
    return ids[before < sampling.top_p].sort().values
