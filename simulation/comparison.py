"""Compares what came out with what must: every difference is counted and named. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from sideband.masks.rows import MaskRows, ScoreRows
from simulation.assembly import Sequence
from simulation.expected import ExpectedSample

FINDINGS_SHOWN_MAX: Final = 20
IGNORED_LABEL: Final = -100
UNKNOWN_VERSION: Final = -1
Ragged = TypeVar("Ragged", MaskRows, ScoreRows)


@dataclass(slots=True)
class Check:
    """One line of the table of checks."""

    name: str
    compared: int = 0
    different: int = 0
    findings: list[str] = field(default_factory=list)

    def add(self, *findings: str, compared: int = 1) -> None:
        """Count one comparison; any finding makes it a difference."""
        self.compared += compared
        if findings:
            self.different += 1
            self.findings.extend(findings[: FINDINGS_SHOWN_MAX - len(self.findings)])

    @property
    def is_good(self) -> bool:
        """Nothing differs, and there was something to compare."""
        return self.compared > 0 and self.different == 0


class Checks:
    """All checks of a run, in the order in which they were first made."""

    def __init__(self) -> None:
        self._by_name: dict[str, Check] = {}

    def of(self, name: str) -> Check:
        """The check with this name."""
        return self._by_name.setdefault(name, Check(name))

    def __iter__(self) -> Iterator[Check]:
        return iter(self._by_name.values())

    @property
    def is_good(self) -> bool:
        """Every check is good, and there was one."""
        return bool(self._by_name) and all(check.is_good for check in self)


def sample_differences(
    found: Sequence, expected: ExpectedSample, *, weight_version_max: int = 0
) -> list[str]:
    """Everything by which a sequence at the ranks differs from its seeded truth.

    ``weight_version_max`` is the last version that engines had: 0 when weights never changed.
    """
    tokens = len(expected.token_ids_T)
    if len(found.columns["input_ids"]) != tokens:
        length = len(found.columns["input_ids"])
        return [f"{expected.sample_id}: {length} tokens instead of {tokens}"]
    loss_T = following(expected.loss_mask_T, np.bool_(False))
    labels_T = following(expected.token_ids_T, np.int32(IGNORED_LABEL))
    advantages_T = np.where(loss_T, expected.advantage, np.float32(0))
    pairs: dict[str, tuple[NDArray[np.generic], NDArray[np.generic]]] = {
        "input_ids": (found.columns["input_ids"], expected.token_ids_T),
        "labels": (found.columns["labels"], labels_T),
        "loss_mask": (found.columns["loss_mask"], loss_T),
        "logprobs": (found.columns["logprobs"], following(expected.logprobs_T, np.float32(0))),
        "advantages": (found.columns["advantages"], advantages_T),
        "temperatures": (
            found.columns["temperatures"][loss_T],
            np.full(int(loss_T.sum()), expected.temperature),
        ),
        "position_ids": (found.columns["position_ids"], np.arange(tokens, dtype=np.int32)),
    }
    wrong = [name for name, (a, b) in pairs.items() if not same(a, b)]
    if found.env_name != expected.env_name:
        wrong.append("env_name")
    wrong += _row_differences(found, expected)
    wrong += _version_differences(found, loss_T, weight_version_max=weight_version_max)
    return [f"{expected.sample_id}: {name}" for name in wrong]


def _row_differences(found: Sequence, expected: ExpectedSample) -> list[str]:
    tokens, rows = len(expected.token_ids_T), len(expected.routing_NLK)
    wrong = []
    if found.routing is None:
        wrong.append("routing is missing")
    else:
        valid_T = np.arange(tokens) < rows
        if not same(found.columns["routing_valid"], valid_T):
            wrong.append("routing_valid")
        if not same(found.routing[:rows], expected.routing_NLK) or found.routing[rows:].any():
            wrong.append("routed_experts")
    if not found.masks.equals(described(expected.masks)):
        wrong.append("sampling mask")
    wanted = None if expected.scores is None else described(expected.scores)
    if found.scores is None or wanted is None:
        if found.scores is not wanted:
            wrong.append("logprobs of kept ids are missing, or unasked")
    elif not found.scores.equals(wanted):
        wrong.append("logprobs of kept ids")
    return wrong


def described(rows: Ragged) -> Ragged:
    """Each row beside the token before it, as labels are; the first token's is nobody's label."""
    counts_T = following(np.diff(rows.starts_N), np.int64(0))
    starts_T = np.concatenate([[0], np.cumsum(counts_T)])
    return type(rows)(starts_T, rows.values_M[rows.starts_N[1] :])


def _version_differences(
    found: Sequence, loss_T: NDArray[np.generic], *, weight_version_max: int
) -> list[str]:
    """No token is older than its rollout's dispatch, and only sampled tokens have a version."""
    wrong = []
    if not 0 <= found.policy_version <= weight_version_max:
        wrong.append("policy_version")
    versions_T = found.weight_versions_T
    if versions_T is None:
        return [*wrong, "weight_versions are missing"]
    sampled = versions_T[loss_T.astype(np.bool_)]
    is_known = (found.policy_version <= sampled).all() and (sampled <= weight_version_max).all()
    if not is_known or (versions_T[~loss_T.astype(np.bool_)] != UNKNOWN_VERSION).any():
        wrong.append("weight_versions")
    return wrong


def padding_differences(padding: Sequence) -> list[str]:
    """A pad trains nothing, replays nothing and names nothing."""
    columns = padding.columns
    if not len(columns["input_ids"]):
        return []
    wrong = [name for name in ("loss_mask", "routing_valid", "input_ids") if columns[name].any()]
    if (columns["labels"] != IGNORED_LABEL).any():
        wrong.append("labels")
    if len(padding.masks.ids_M):
        wrong.append("sampling mask")
    return [f"padding after {padding.sample_id}: {name}" for name in wrong]


def following(column_T: NDArray[np.generic], last: np.generic) -> NDArray[np.generic]:
    """The column about the token after each one."""
    return np.append(column_T[1:], last).astype(column_T.dtype)


def same(a: NDArray[np.generic], b: NDArray[np.generic]) -> bool:
    """Bitwise: equal dtype, shape and bytes."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
