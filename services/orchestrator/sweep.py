"""Plans the orphan sweep (retention rule 3). Pure: ``files.py`` lists and deletes.

A version folder is orphaned when it is older than every live rollout **and** older than
step − max_off_policy_steps: nothing that is written there from now on could still train. When the
run has ended nothing will train at all. What a holder refers to stays, whatever its age.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sideband.payload.paths import POLICY_VERSION_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRules:
    """What decides the age of a folder. ``oldest_live`` is None when no rollout is alive."""

    step: int
    max_off_policy_steps: int
    oldest_live: int | None
    has_ended: bool = False

    @property
    def keep_from(self) -> int:
        """Folders v<k> with k at or above this stay."""
        if self.has_ended:
            return POLICY_VERSION_MAX + 1
        aged = self.step - self.max_off_policy_steps
        return aged if self.oldest_live is None else min(aged, self.oldest_live)


def orphaned_versions(versions: Iterable[int], rules: SweepRules) -> list[int]:
    """The versions whose folders hold only orphans and held files."""
    return sorted(version for version in versions if version < rules.keep_from)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPlan:
    """What to do with one orphaned version: all of it, or only ``files``."""

    policy_version: int
    is_whole: bool
    files: tuple[str, ...]
    size_bytes: int
    kept_count: int


def plan_version(
    policy_version: int, files: Sequence[tuple[str, int]], is_held: Callable[[str], bool]
) -> VersionPlan:
    """``files`` are (name, bytes) of one orphaned version."""
    orphans = [(name, size) for name, size in files if not is_held(name)]
    return VersionPlan(
        policy_version=policy_version,
        is_whole=len(orphans) == len(files),
        files=tuple(name for name, _ in orphans),
        size_bytes=sum(size for _, size in orphans),
        kept_count=len(files) - len(orphans),
    )
