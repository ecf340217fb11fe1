"""A decoder of the Qwen3-MoE family. Parameters are named as in the checkpoints of that family.

Legend: N rows of tokens, M keys, E hidden size, H query heads, G key heads, D head size,
K experts per token, X experts, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from examples.train_tiny_moe.config import TinyMoeConfig
from examples.train_tiny_moe.rows import Keys, OwnKeys, TokenRows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forward:
    """Logits, and the experts that ran: [N, K] by decoder layer id."""

    logits_NV: torch.Tensor
    experts_NK: dict[int, torch.Tensor]


class RmsNorm(nn.Module):
    """Root mean square norm over the last dimension, computed in float32 at least."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Same shape and dtype."""
        wide = hidden.to(wide_dtype(hidden))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(hidden.dtype)


class Attention(nn.Module):
    """Grouped-query attention with norms on queries and keys, and rotary positions."""

    def __init__(self, config: TinyMoeConfig) -> None:
        super().__init__()
        size, head = config.hidden_size, config.head_dim
        self.head_dim, self.theta = head, config.rope_theta
        self.q_proj = nn.Linear(size, config.num_heads * head, bias=False)
        self.k_proj = nn.Linear(size, config.num_kv_heads * head, bias=False)
        self.v_proj = nn.Linear(size, config.num_kv_heads * head, bias=False)
        self.o_proj = nn.Linear(config.num_heads * head, size, bias=False)
        self.q_norm = RmsNorm(head, config.rms_norm_eps)
        self.k_norm = RmsNorm(head, config.rms_norm_eps)

    def forward(
        self,
        hidden_NE: torch.Tensor,
        position_N: torch.Tensor,
        sees_NM: torch.Tensor,
        keys: Keys,
        layer: int,
    ) -> torch.Tensor:
        """[N, E]. ``keys`` brings the keys of other rows."""
        rows = len(hidden_NE)
        query_NHD = self.q_norm(self.q_proj(hidden_NE).view(rows, -1, self.head_dim))
        key_NGD = self.k_norm(self.k_proj(hidden_NE).view(rows, -1, self.head_dim))
        value_NGD = self.v_proj(hidden_NE).view(rows, -1, self.head_dim)
        query_NHD = self._turned(query_NHD, position_N)
        key_MGD, value_MGD = keys.extend(layer, self._turned(key_NGD, position_N), value_NGD)
        seen_HND = F.scaled_dot_product_attention(
            query_NHD.transpose(0, 1),
            key_MGD.transpose(0, 1),
            value_MGD.transpose(0, 1),
            attn_mask=sees_NM,
            enable_gqa=True,
        )
        out: torch.Tensor = self.o_proj(seen_HND.transpose(0, 1).reshape(rows, -1))
        return out

    def _turned(self, heads: torch.Tensor, position_N: torch.Tensor) -> torch.Tensor:
        """Each pair (i, i + D/2) of a head turned by position × theta^(-2i/D)."""
        wide = wide_dtype(heads)
        half = torch.arange(0, self.head_dim, 2, dtype=wide) / self.head_dim
        angle = position_N.to(wide)[:, None] * self.theta**-half
        cos, sin = angle.cos()[:, None].to(heads.dtype), angle.sin()[:, None].to(heads.dtype)
        first, second = heads.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Mlp(nn.Module):
    """SwiGLU: a dense layer's, and one expert's."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """[N, E]."""
        out: torch.Tensor = self.down_proj(
            F.silu(self.gate_proj(hidden_NE)) * self.up_proj(hidden_NE)
        )
        return out


class Experts(nn.Module):
    """A router and its experts. Replayed ids keep the router's own weights: it is still trained."""

    def __init__(self, config: TinyMoeConfig) -> None:
        super().__init__()
        self.top_k, self.norm_topk_prob = config.shape.top_k, config.norm_topk_prob
        self.gate = nn.Linear(config.hidden_size, config.shape.id_space, bias=False)
        self.experts = nn.ModuleList(
            Mlp(config.hidden_size, config.moe_intermediate_size)
            for _ in range(config.shape.id_space)
        )

    def forward(
        self,
        hidden_NE: torch.Tensor,
        replayed_NK: torch.Tensor | None,
        valid_N: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, E] and the ids that ran, [N, K]: the replayed ones where they are valid."""
        router_NX = self.gate(hidden_NE)
        probs_NX = torch.softmax(router_NX, dim=-1, dtype=wide_dtype(hidden_NE))
        ids_NK = torch.topk(probs_NX, self.top_k, dim=-1).indices
        if replayed_NK is not None and valid_N is not None:
            ids_NK = torch.where(valid_N[:, None], replayed_NK, ids_NK)
        weights_NK = probs_NX.gather(1, ids_NK)
        if self.norm_topk_prob:
            weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
        weights_NK = weights_NK.to(hidden_NE.dtype)
        out_NE = torch.zeros_like(hidden_NE)
        for number, expert in enumerate(self.experts):
            row, slot = torch.where(ids_NK == number)
            ran = expert(hidden_NE[row]) * weights_NK[row, slot, None]
            out_NE = out_NE.index_add(0, row, ran)
        return out_NE, ids_NK


class Layer(nn.Module):
    """One decoder layer, dense or routed."""

    def __init__(self, config: TinyMoeConfig, number: int) -> None:
        super().__init__()
        self.number = number
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp: Experts | Mlp = (
            Experts(config)
            if number in config.shape.layer_ids
            else Mlp(config.hidden_size, config.intermediate_size)
        )

    def forward(
        self, hidden_NE: torch.Tensor, rows: TokenRows, sees_NM: torch.Tensor, keys: Keys
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[N, E], and the experts that ran in a routed layer."""
        normed_NE = self.input_layernorm(hidden_NE)
        hidden_NE = hidden_NE + self.self_attn(
            normed_NE, rows.position_N, sees_NM, keys, self.number
        )
        normed_NE = self.post_attention_layernorm(hidden_NE)
        if isinstance(self.mlp, Mlp):
            return hidden_NE + self.mlp(normed_NE), None
        replay = rows.replay
        ran_NE, ids_NK = self.mlp(
            normed_NE,
            None if replay is None else replay.experts_NK[self.number],
            None if replay is None else replay.valid_N,
        )
        return hidden_NE + ran_NE, ids_NK


class Decoder(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, config: TinyMoeConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.shape.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.num_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)


class TinyMoe(nn.Module):
    """The whole model. Runs in the dtype of its parameters."""

    def __init__(self, config: TinyMoeConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.shape.vocab_size, bias=False)

    def forward(self, rows: TokenRows, keys: Keys | None = None) -> Forward:
        """Logits of what follows each row; without ``keys`` rows see only each other."""
        keys = keys or OwnKeys()
        sequence_M, order_M = keys.places(rows.sequence_N, rows.order_N)
        sees_NM = (rows.sequence_N[:, None] == sequence_M) & (rows.order_N[:, None] >= order_M)
        hidden_NE = self.model.embed_tokens(rows.token_ids_N)
        experts_NK: dict[int, torch.Tensor] = {}
        for number, layer in enumerate(self.model.layers):
            hidden_NE, ids_NK = layer(hidden_NE, rows, sees_NM, keys)
            if ids_NK is not None:
                experts_NK[number] = ids_NK
        logits_NV = self.lm_head(self.model.norm(hidden_NE))
        return Forward(logits_NV=logits_NV, experts_NK=experts_NK)


def wide_dtype(tensor: torch.Tensor) -> torch.dtype:
    """float32 for anything narrower: what norms, rotary angles and routers are computed in."""
    return torch.promote_types(tensor.dtype, torch.float32)
