"""Which file is kept, and by what. A pure state machine: it decides, ``files.py`` deletes.

A *holder* is a reason to keep files: an open lease, a collected rollout, a group whose members
share the request's choices, or a step. A step holds its files until every global rank has
committed it **and** inference has applied its policy v(s). A file is given up in the moment
its last holder lets go: whoever of several steps is last decides. What was given up once is never
held again: it may be gone already.

``steps_kept`` of the last steps that are done are held longer, for a trainer that goes back to an
earlier checkpoint.

Rules 1 and 2 of the SPEC are the release of a step and of everything else; ``sweep.py`` plans
rule 3.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

HolderKind = Literal["lease", "rollout", "group", "step"]


@dataclass(frozen=True, slots=True, order=True)
class Holder:
    """One reason to keep files."""

    kind: HolderKind
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(slots=True)
class _Step:
    is_acknowledged: bool = False


def version_of(file: str) -> int:
    """The policy version k of ``v<k>/…``. The path was checked before."""
    return int(file[1 : file.index("/")])


class Retention:
    """Holders of each file and files of each holder; tombstones of what was given up."""

    def __init__(self, *, steps_kept: int = 0) -> None:
        self._steps_kept = steps_kept
        self._holders: dict[str, set[Holder]] = {}
        self._files: dict[Holder, set[str]] = {}
        self._steps: dict[int, _Step] = {}
        self._applied = 0
        self._given_up: defaultdict[int, set[str]] = defaultdict(set)  # by policy version

    def hold(self, holder: Holder, files: Iterable[str]) -> list[str]:
        """Keep ``files`` for ``holder``. Those given up before are returned, and not held."""
        gone = []
        for file in files:
            if self.is_given_up(file):
                gone.append(file)
                continue
            self._holders.setdefault(file, set()).add(holder)
            self._files.setdefault(holder, set()).add(file)
        return sorted(gone)

    def release(self, holder: Holder) -> list[str]:
        """``holder`` lets go of everything. The files that nobody holds any more, to be deleted."""
        freed = []
        for file in sorted(self._files.pop(holder, ())):
            holders = self._holders[file]
            holders.discard(holder)
            if not holders:
                del self._holders[file]
                self._given_up[version_of(file)].add(file)
                freed.append(file)
        return freed

    def discard(self, files: Iterable[str]) -> list[str]:
        """Give up what refused or losing work names, unless somebody holds it. To be deleted."""
        freed = []
        for file in sorted(set(files)):
            if file not in self._holders and not self.is_given_up(file):
                self._given_up[version_of(file)].add(file)
                freed.append(file)
        return freed

    def lose(self, files: Iterable[str]) -> list[str]:
        """``files`` are gone from the disk: nobody holds them any more. To be deleted, for sure."""
        for file in (lost := sorted(set(files))):
            for holder in self._holders.pop(file, ()):
                self._files[holder].discard(file)
            self._given_up[version_of(file)].add(file)
        return lost

    def unship(self, step: int) -> None:
        """``step`` will not be built. It must hold nothing any more."""
        freed = self.undo(step)
        assert not freed, "its files are gone"

    def undo(self, step: int) -> list[str]:
        """``step`` is no step any more; its rollouts hold what they need. Files to be deleted."""
        del self._steps[step]
        return self.release(Holder("step", str(step)))

    def go_back(self, step: int) -> None:
        """The trainer went back to ``step``: later ones are neither committed nor applied."""
        self._applied = min(self._applied, step)
        for number, state in self._steps.items():
            if number > step:
                state.is_acknowledged = False

    def ship(self, step: int, files: Iterable[str]) -> None:
        """``step`` now refers to ``files``, all of which are held by its rollouts."""
        assert step not in self._steps or self._steps[step].is_acknowledged, "a step is built once"
        self._steps.setdefault(step, _Step())
        gone = self.hold(Holder("step", str(step)), files)
        assert not gone, "a step is built of files that are held"

    def acknowledge(self, step: int) -> list[str]:
        """Every global rank has committed ``step``. Files to be deleted."""
        if step not in self._steps:
            return []
        self._steps[step].is_acknowledged = True
        return self.close_steps()

    def apply(self, policy_version: int) -> list[str]:
        """Every serving engine has applied v(``policy_version``). Files to be deleted."""
        self._applied = max(self._applied, policy_version)
        return self.close_steps()

    def close_steps(self) -> list[str]:
        """Let go of the steps that are done, but for the last that are kept. To be deleted."""
        done = [step for step in sorted(self._steps) if self.is_done(step)]
        freed = []
        for step in done[: max(0, len(done) - self._steps_kept)]:
            del self._steps[step]
            freed.extend(self.release(Holder("step", str(step))))
        return freed

    def keep_no_steps(self) -> list[str]:
        """Nobody will go back any more: let go of steps that are done. Files to be deleted."""
        self._steps_kept = 0
        return self.close_steps()

    def is_done(self, step: int) -> bool:
        """Whether every rank has committed ``step`` and v(``step``) is applied, or it is closed."""
        state = self._steps.get(step)
        return state is None or (state.is_acknowledged and step <= self._applied)

    def is_open(self, step: int) -> bool:
        """Whether ``step`` was shipped and still holds its files."""
        return step in self._steps

    def why(self, file: str) -> list[Holder]:
        """What keeps ``file``; nothing when it may go."""
        return sorted(self._holders.get(file, ()))

    def is_held(self, file: str) -> bool:
        """Whether anything keeps ``file``. May be asked from any thread."""
        return file in self._holders

    def is_given_up(self, file: str) -> bool:
        """Whether ``file`` was given up, and may be deleted already."""
        given_up = self._given_up.get(version_of(file))
        return given_up is not None and file in given_up

    def held_files(self) -> list[str]:
        """Every file that something holds, by name."""
        return sorted(self._holders)

    @property
    def held_count(self) -> int:
        """Number of files that something holds."""
        return len(self._holders)

    def files_of(self, holder: Holder) -> frozenset[str]:
        """What ``holder`` keeps."""
        return frozenset(self._files.get(holder, ()))

    def restore(
        self, *, applied: int, given_up: Iterable[str], acknowledged: Iterable[int] = ()
    ) -> None:
        """Take over what was recorded, before anything is held again.

        ``acknowledged`` steps are those that were not let go of; ``close_steps`` does so if the
        number of steps kept is smaller now.
        """
        assert not self._holders, "restored once, before anything else"
        self._applied = applied
        for file in given_up:
            self._given_up[version_of(file)].add(file)
        for step in acknowledged:
            self._steps[step] = _Step(is_acknowledged=True)

    def forget(self, policy_version: int) -> None:
        """Drop the tombstones of a version whose folder is gone and takes no files any more."""
        self._given_up.pop(policy_version, None)
