"""What the model takes: rows of tokens, the keys that they may see, the experts that ran.

Legend: N rows of tokens, M keys, K experts per layer, G key heads, D head size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, Self

import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replay:
    """The experts that ran in the engine, by decoder layer id.

    Rows where ``valid_N`` is False were not reported: the model's own router decides there.
    """

    experts_NK: Mapping[int, torch.Tensor]
    valid_N: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenRows:
    """Tokens of any number of sequences. A row sees the keys of its own sequence, up to itself.

    ``sequence_N`` names each row's sequence and ``order_N`` its place in it: only their comparison
    counts. ``position_N`` is what the rotary embedding turns by.
    """

    token_ids_N: torch.Tensor
    sequence_N: torch.Tensor
    order_N: torch.Tensor
    position_N: torch.Tensor
    replay: Replay | None

    @classmethod
    def of_sequence(cls, token_ids_N: torch.Tensor, replay: Replay | None) -> Self:
        """The rows of one whole sequence."""
        places = torch.arange(len(token_ids_N))
        return cls(
            token_ids_N=token_ids_N,
            sequence_N=torch.zeros_like(places),
            order_N=places,
            position_N=places,
            replay=replay,
        )


class Keys(Protocol):
    """Where the keys and values come from that a forward pass may see."""

    def places(
        self, sequence_N: torch.Tensor, order_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequence and order of all M keys. Called once per forward pass, before ``extend``."""

    def extend(
        self, layer: int, key_NGD: torch.Tensor, value_NGD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all M places, given those of the pass's own rows."""


class OwnKeys:
    """Rows see only rows of the same pass."""

    def places(
        self, sequence_N: torch.Tensor, order_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows' own."""
        return sequence_N, order_N

    def extend(
        self, layer: int, key_NGD: torch.Tensor, value_NGD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows' own."""
        return key_NGD, value_NGD


class CachedKeys:
    """Keys of all earlier passes are kept: an engine's cache. Grows without a bound of its own."""

    def __init__(self) -> None:
        self._places: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._layers: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def places(
        self, sequence_N: torch.Tensor, order_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of all passes so far."""
        self._places.append((sequence_N, order_N))
        return _joined(self._places)

    def extend(
        self, layer: int, key_NGD: torch.Tensor, value_NGD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of all passes so far."""
        kept = self._layers.setdefault(layer, [])
        kept.append((key_NGD, value_NGD))
        return _joined(kept)


def _joined(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([one for one, _ in pairs]), torch.cat([other for _, other in pairs])
