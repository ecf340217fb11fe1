"""What the simulated model does: tokens, kept sets and routing as pure functions of the prefix.

Everything about position t follows from the seed and the tokens up to t, so that any two engines,
legs or turns that saw the same tokens must report the same rows, and a checker that only has the
tokens can recompute every row. The sampled token also depends on the request's sampling seed.

A prefix hash is a wrapping sum of mixed (position, token) pairs, mixed once more: vectorised over
whole sequences and cheap to extend by one token.

Legend: T tokens, N rows, L routed layers, K expert ids, M kept ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from sideband.masks.rows import MaskRows, ScoreRows
from sideband.model import ModelShape
from sideband.routing.rows import RowArray

HashArray = NDArray[np.uint64]

_WORD: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX_A: Final = 0xBF58476D1CE4E5B9
_MIX_B: Final = 0x94D049BB133111EB
# separate streams of one hash
_ROUTING, _KEPT, _LOGPROB, _CHOICE, _SCORE = 0x52, 0x4B, 0x4C, 0x43, 0x53
STRIDES_MAX: Final = 64  # different steps through an id space; more would change nothing
MAY_STOP_EVERY: Final = 8  # one prefix in eight can end the sequence


def mix(value: int) -> int:
    """splitmix64's finaliser: 64 bits in, 64 well mixed bits out."""
    value = ((value ^ (value >> 30)) * _MIX_A) & _WORD
    value = ((value ^ (value >> 27)) * _MIX_B) & _WORD
    return value ^ (value >> 31)


def mix_array(values: HashArray) -> HashArray:
    """``mix`` of each element."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX_A)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MIX_B)
    return values ^ (values >> np.uint64(31))


def coprimes(space: int) -> NDArray[np.int64]:
    """Steps that visit every id of ``space`` before they repeat one."""
    if space < 3:
        return np.ones(1, np.int64)
    step = max(1, space // STRIDES_MAX)
    found = [n for start in range(1, space, step) if gcd(n := start, space) == 1]
    return np.array(found or [1], np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one choice samples. ``seed`` decides the tokens, never the rows."""

    seed: int
    top_k: int
    tokens_max: int
    tokens_min: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignores_eos: bool = False


class Truth:
    """The simulated model: its shape, its seed and the token that ends a sequence."""

    def __init__(self, model: ModelShape, *, seed: int, eos_token_id: int = 2) -> None:
        self.model, self.seed, self.eos_token_id = model.check(), seed, eos_token_id
        self._salt = mix(seed + _GOLDEN)
        self._expert_strides = coprimes(model.id_space)
        self._vocab_strides = coprimes(model.vocab_size)

    def hashes(self, token_ids_T: NDArray[np.int32]) -> HashArray:
        """H[i] belongs to the prefix of i tokens: T + 1 values, the first for no token at all."""
        sums = np.zeros(len(token_ids_T) + 1, np.uint64)
        np.cumsum(self._terms(token_ids_T), out=sums[1:])
        return mix_array(sums ^ np.uint64(self._salt))

    def routing(self, token_ids_T: NDArray[np.int32], start: int, stop: int) -> RowArray:
        """Rows [stop - start, L, K] of positions [start, stop): token t's own row is H[t + 1]."""
        return self.routing_of(self.hashes(token_ids_T)[start + 1 : stop + 1])

    def routing_of(self, hashes_N: HashArray) -> RowArray:
        """One row of K distinct ids per routed layer for each hash; unordered, as routers are."""
        model = self.model
        layer_salts = np.array([mix(layer * 2 + 1) ^ _ROUTING for layer in model.layer_ids])
        hashes_NL = mix_array(hashes_N[:, None] ^ layer_salts.astype(np.uint64)[None, :])
        base_NL = (hashes_NL % np.uint64(model.id_space)).astype(np.int64)
        which_NL = (hashes_NL >> np.uint64(40)) % np.uint64(len(self._expert_strides))
        stride_NL = self._expert_strides[which_NL.astype(np.int64)]
        places_K = np.arange(model.top_k, dtype=np.int64)
        ids = (base_NL[..., None] + stride_NL[..., None] * places_K) % model.id_space
        return cast("RowArray", ids.astype(model.row_dtype))

    def masks(self, token_ids_T: NDArray[np.int32], start: int, *, top_k: int) -> MaskRows:
        """Kept sets of the tokens at positions [start, T): token t's follows from H[t]."""
        return self.masks_of(self.hashes(token_ids_T)[start:-1], top_k=top_k)

    def masks_of(self, hashes_N: HashArray, *, top_k: int) -> MaskRows:
        """The kept set after each prefix: 1 to ``top_k`` ids, ascending."""
        vocab_size = self.model.vocab_size
        mixed = mix_array(hashes_N ^ np.uint64(_KEPT))
        counts_N = self._counts(mixed, top_k)
        base_N = (mixed % np.uint64(vocab_size)).astype(np.int64)
        base_N[(mixed >> np.uint64(32)) % np.uint64(MAY_STOP_EVERY) == 0] = self.eos_token_id
        which = (mixed >> np.uint64(40)) % np.uint64(len(self._vocab_strides))
        stride_N = self._vocab_strides[which.astype(np.int64)]
        starts_N = np.zeros(len(hashes_N) + 1, np.int64)
        np.cumsum(counts_N, out=starts_N[1:])
        row_M = np.repeat(np.arange(len(hashes_N)), counts_N)
        place_M = np.arange(starts_N[-1]) - starts_N[row_M]
        ids_M = (base_N[row_M] + stride_N[row_M] * place_M) % vocab_size
        keys_M = np.sort(row_M * vocab_size + ids_M)
        return MaskRows(starts_N, (keys_M % vocab_size).astype(np.int32))

    def _counts(self, mixed: HashArray, top_k: int) -> NDArray[np.int64]:
        most = max(1, min(top_k, self.model.vocab_size))
        return (1 + (mixed >> np.uint64(8)) % np.uint64(most)).astype(np.int64)

    def scores_of(self, hashes_N: HashArray, masks: MaskRows) -> ScoreRows:
        """Logprobs of the kept ids after each prefix: multiples of 1/256, as ``logprobs`` are."""
        row_M = np.repeat(np.arange(len(masks)), np.diff(masks.starts_N))
        mixed = mix_array(hashes_N[row_M] ^ np.uint64(_SCORE) ^ mix_array(masks.ids_M.astype("u8")))
        steps = mixed % np.uint64(2048)
        return ScoreRows(masks.starts_N, -(steps.astype(np.float32) / np.float32(256)))

    def scores(self, token_ids_T: NDArray[np.int32], start: int, *, top_k: int) -> ScoreRows:
        """The same for the tokens at positions [start, T)."""
        hashes_N = self.hashes(token_ids_T)[start:-1]
        return self.scores_of(hashes_N, self.masks_of(hashes_N, top_k=top_k))

    def logprobs(self, token_ids_T: NDArray[np.int32], start: int) -> NDArray[np.float32]:
        """Logprobs of the tokens at [start, T): multiples of 1/256, so that JSON keeps them."""
        own = self.hashes(token_ids_T)[start + 1 :]
        steps = mix_array(own ^ np.uint64(_LOGPROB)) % np.uint64(2048)
        return -(steps.astype(np.float32) / np.float32(256))

    def sample(self, prompt_ids: Sequence[int], sampling: Sampling) -> list[int]:
        """The completion: ends after ``tokens_max`` tokens or with a stop token (included)."""
        total = int(self._terms(np.asarray(prompt_ids, np.int32)).sum(dtype=np.uint64))
        vocab_size, position = self.model.vocab_size, len(prompt_ids)
        salt, choice_salt = self._salt, mix(sampling.seed) ^ _CHOICE
        most = max(1, min(sampling.top_k, vocab_size))
        completion: list[int] = []
        while len(completion) < sampling.tokens_max:
            prefix = mix(total ^ salt)
            mixed = mix(prefix ^ _KEPT)
            may_stop = (mixed >> 32) % MAY_STOP_EVERY == 0
            base = self.eos_token_id if may_stop else mixed % vocab_size
            stride = int(self._vocab_strides[(mixed >> 40) % len(self._vocab_strides)])
            place = mix(prefix ^ choice_salt) % (1 + (mixed >> 8) % most)
            token = (base + stride * place) % vocab_size
            completion.append(token)
            position += 1
            pair = (token + position * _GOLDEN) & _WORD
            total = (total + mix(pair ^ salt)) & _WORD
            if len(completion) >= sampling.tokens_min and self._stops(token, sampling):
                break
        return completion

    def _stops(self, token: int, sampling: Sampling) -> bool:
        is_eos = token == self.eos_token_id and not sampling.ignores_eos
        return is_eos or token in sampling.stop_token_ids

    def _terms(self, token_ids_T: NDArray[np.int32]) -> HashArray:
        """What each token adds to the prefix's sum."""
        pairs = token_ids_T.astype(np.uint64)
        pairs += np.arange(1, len(pairs) + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        return mix_array(pairs ^ np.uint64(self._salt))
