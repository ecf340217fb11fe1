"""One model that learns from a rank's micro batches: forward, loss, gradients, one step.

This is the part to read before writing a trainer: how the arrays of ``RankFeed`` are used.

Legend: N rows of this rank's chunk, L routed layers, K experts per layer.
"""

from dataclasses import dataclass, replace

import torch

from examples.train_tiny_moe.logprobs import kept_divergence, kept_logprobs
from examples.train_tiny_moe.loss import NO_TOKENS, Mismatch, policy_loss
from examples.train_tiny_moe.model import TinyMoe
from examples.train_tiny_moe.rows import Keys, Replay, TokenRows
from sideband.torch.tensors import TensorMicroBatch

LEARNING_RATE = 0.5
MOMENTUM = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What of the engine's rows a forward pass uses."""

    routing: bool
    masks: bool


REPLAYED = Use(routing=True, masks=True)
USES = (
    Use(routing=False, masks=False),
    Use(routing=True, masks=False),
    Use(routing=False, masks=True),
    REPLAYED,
)


def replay_of(batch: TensorMicroBatch) -> Replay | None:
    """The batch's routing by decoder layer id. None when the whole packed row has none."""
    if batch.routed_experts is None:
        return None
    experts_NLK = batch.routed_experts[0].long()
    columns = enumerate(batch.layer_ids)
    return Replay(
        experts_NK={layer: experts_NLK[:, column] for column, layer in columns},
        valid_N=batch.routing_valid[0],
    )


def token_rows(batch: TensorMicroBatch, *, replays: bool = True) -> TokenRows:
    """The batch as the model takes it. Boundaries are those of the whole packed row, so that a
    chunk knows which of its siblings' keys belong to its own sequences."""
    places_N = batch.packed_positions
    sequence_N = torch.searchsorted(batch.cu_seqlens.long(), places_N, right=True)
    return TokenRows(
        token_ids_N=batch.input_ids[0].long(),
        sequence_N=sequence_N,
        order_N=places_N,
        position_N=batch.position_ids[0].long(),
        replay=replay_of(batch) if replays else None,
    )


def batch_logprobs(
    model: TinyMoe, batch: TensorMicroBatch, keys: Keys | None = None, *, use: Use = REPLAYED
) -> torch.Tensor:
    """[N]: of each row's label. Where there is no label it means nothing, and is never trained."""
    logits_NV = model(token_rows(batch, replays=use.routing), keys).logits_NV
    return label_logprobs(logits_NV, batch, use=use)


def label_logprobs(logits_NV: torch.Tensor, batch: TensorMicroBatch, *, use: Use) -> torch.Tensor:
    """[N]: the same out of the batch's logits."""
    starts, ids_M = batch.mask_starts, batch.mask_ids.long()
    if not use.masks:
        starts, ids_M = torch.zeros_like(starts), ids_M[:0]
    return kept_logprobs(
        logits_NV,
        batch.labels[0].long().clamp_min(0),
        batch.temperatures[0].to(logits_NV.dtype),
        starts,
        ids_M,
    )


def batch_loss(model: TinyMoe, batch: TensorMicroBatch, keys: Keys | None = None) -> torch.Tensor:
    """The sum over the trained rows of this chunk."""
    logprobs_N = batch_logprobs(model, batch, keys)
    return policy_loss(
        logprobs_N,
        batch.logprobs[0].to(logprobs_N.dtype),
        batch.advantages[0].to(logprobs_N.dtype),
        batch.loss_mask[0],
    )


def with_divergence(
    found: Mismatch, logits_NV: torch.Tensor, batch: TensorMicroBatch, *, use: Use
) -> Mismatch:
    """The mismatch with the divergence over kept ids, where their logprobs came and are used."""
    if batch.mask_logprobs is None or not use.masks:
        return found
    divergence_N, is_reported_N = kept_divergence(
        logits_NV,
        batch.temperatures[0].to(logits_NV.dtype),
        batch.mask_starts,
        batch.mask_ids.long(),
        batch.mask_logprobs,
    )
    counts_N = batch.loss_mask[0] & is_reported_N
    return replace(
        found, scored=int(counts_N.sum()), divergence=float(divergence_N[counts_N].double().sum())
    )


class Learner:
    """A model, its optimizer and the sums of the running step. Not thread-safe."""

    def __init__(self, model: TinyMoe) -> None:
        self.model = model
        # Plain SGD: equal gradients give equal weights. Adam would divide noise by noise.
        self.optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
        self.loss_sum, self.tokens = 0.0, 0
        self.mismatch = dict.fromkeys(USES, NO_TOKENS)

    def add(self, batch: TensorMicroBatch, keys: Keys | None = None) -> None:
        """Add a micro batch's loss, and its gradients to those of the parameters."""
        loss = batch_loss(self.model, batch, keys)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        self.loss_sum += float(loss.detach())
        self.tokens += int(batch.loss_mask.sum())

    def compare(self, batch: TensorMicroBatch, keys: Keys | None = None) -> None:
        """Measure how far from the engine each use of its rows would be. No gradients."""
        with torch.no_grad():
            for use in USES:
                logits_NV = self.model(token_rows(batch, replays=use.routing), keys).logits_NV
                logprobs_N = label_logprobs(logits_NV, batch, use=use)
                sampled_N = batch.logprobs[0].to(logprobs_N.dtype)
                found = Mismatch.of(logprobs_N, sampled_N, batch.loss_mask[0])
                self.mismatch[use] += with_divergence(found, logits_NV, batch, use=use)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Copies, by parameter name; zeros where nothing reached the parameter."""
        return {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            for name, parameter in self.model.named_parameters()
        }

    def step(self) -> None:
        """Apply the gradients and forget the step's sums."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss_sum, self.tokens = 0.0, 0
        self.mismatch = dict.fromkeys(USES, NO_TOKENS)
