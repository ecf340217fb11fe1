"""Retention: nothing needed is given up, everything else is, whatever the order of events."""

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from services.orchestrator.retention import Holder, Retention

FILES = st.frozensets(
    st.integers(0, 11).map(lambda n: f"v{n % 3}/run/00/r{n}-0123456789abcdef.sbp"), max_size=4
)


class Model(RuleBasedStateMachine):
    """A plain model: who names which file. A file is needed while anybody names it."""

    holders = Bundle("holders")
    steps = Bundle("steps")

    def __init__(self) -> None:
        super().__init__()
        self.retention = Retention()
        self.named: dict[str, set[str]] = {}  # by holder
        self.unfinished: dict[int, bool] = {}  # step: is it acknowledged
        self.applied = 0
        self.disk: set[str] = set()  # what an engine wrote and nobody deleted
        self.known: set[str] = set()  # what the orchestrator was ever told of
        self.count = 0

    def delete(self, files: list[str]) -> None:
        assert len(set(files)) == len(files)
        for file in files:
            assert file in self.known
            self.disk.discard(file)

    def told(self, files: frozenset[str]) -> None:
        self.disk |= files - self.known
        self.known |= files

    @rule(target=holders, files=FILES, kind=st.sampled_from(["lease", "rollout", "group"]))
    def hold(self, files: frozenset[str], kind: str) -> str:
        self.count += 1
        name = f"{kind} {self.count}"
        self.told(files)
        gone = self.retention.hold(_holder(name), files)
        assert set(gone) == files - self.disk
        self.named[name] = set(files) & self.disk
        return name

    @rule(name=holders, files=FILES)
    def hold_more(self, name: str, files: frozenset[str]) -> None:
        if name in self.named:
            self.told(files)
            self.retention.hold(_holder(name), files)
            self.named[name] |= files & self.disk

    @rule(name=consumes(holders))
    def release(self, name: str) -> None:
        if self.named.pop(name, None) is not None:
            self.delete(self.retention.release(_holder(name)))

    @rule(files=FILES)
    def discard(self, files: frozenset[str]) -> None:
        self.told(files)
        self.delete(self.retention.discard(files))

    @rule(target=steps, names=st.lists(holders, max_size=3))
    def ship(self, names: list[str]) -> int:
        """A step takes over what its rollouts hold."""
        self.count += 1
        step = self.count
        files = frozenset[str]().union(*(self.named.get(name, set()) for name in names))
        self.retention.ship(step, files)
        self.named[f"step {step}"] = set(files)
        self.unfinished[step] = False
        for name in names:
            self.release(name)
        return step

    @rule(step=steps)
    def acknowledge(self, step: int) -> None:
        if step in self.unfinished:
            self.unfinished[step] = True
        self.close()
        self.delete(self.retention.acknowledge(step))

    @rule(version=st.integers(0, 60))
    def apply(self, version: int) -> None:
        self.applied = max(self.applied, version)
        self.close()
        self.delete(self.retention.apply(version))

    @rule(step=st.integers(0, 60))
    def go_back(self, step: int) -> None:
        """What is not closed must be committed and applied again."""
        self.applied = min(self.applied, step)
        self.unfinished |= {n: False for n in self.unfinished if n > step}
        self.retention.go_back(step)

    @rule(step=steps, target=holders, files=FILES)
    def unpack(self, step: int, files: frozenset[str]) -> str:
        """A step is none any more; a rollout of it keeps some of its files."""
        name = f"rollout {step}.back"
        if step not in self.unfinished or name in self.named:
            return name
        self.named[name] = self.named[f"step {step}"] & files
        assert self.retention.hold(_holder(name), self.named[name]) == []
        del self.unfinished[step], self.named[f"step {step}"]
        self.delete(self.retention.undo(step))
        return name

    def close(self) -> None:
        for step, is_acknowledged in list(self.unfinished.items()):
            if is_acknowledged and step <= self.applied:
                del self.unfinished[step]
                del self.named[f"step {step}"]

    @invariant()
    def nothing_needed_is_deleted(self) -> None:
        needed = set[str]().union(*self.named.values())
        assert needed <= self.disk

    @invariant()
    def nothing_else_is_kept(self) -> None:
        needed = set[str]().union(*self.named.values())
        assert self.disk == needed
        assert self.retention.held_files() == sorted(needed)

    @invariant()
    def every_kept_file_says_why(self) -> None:
        for file in self.known:
            why = {str(holder) for holder in self.retention.why(file)}
            assert why == {name for name, files in self.named.items() if file in files}
            assert self.retention.is_given_up(file) == (file not in self.disk)


def _holder(name: str) -> Holder:
    kind, _, number = name.partition(" ")
    assert kind in ("lease", "rollout", "group", "step")
    return Holder(kind, number)  # type: ignore[arg-type]  # checked above


TestRetention = Model.TestCase

FILE = "v0/run/00/r-0123456789abcdef.sbp"


def test_a_step_keeps_its_files_until_it_is_committed_and_its_policy_is_applied() -> None:
    for first_applied in (True, False):
        retention = Retention()
        retention.hold(Holder("rollout", "r"), [FILE])
        retention.ship(4, [FILE])
        assert retention.release(Holder("rollout", "r")) == []
        early = retention.apply(4) if first_applied else retention.acknowledge(4)
        late = retention.acknowledge(4) if first_applied else retention.apply(5)
        assert (early, late) == ([], [FILE])


def test_of_several_steps_that_use_a_file_the_last_one_decides() -> None:
    retention = Retention()
    retention.ship(1, [FILE])
    retention.ship(2, [FILE])
    assert retention.acknowledge(2) + retention.apply(1) + retention.acknowledge(1) == []
    assert retention.apply(2) == [FILE]


def test_what_was_given_up_is_never_held_again() -> None:
    retention = Retention()
    assert retention.discard([FILE, FILE]) == [FILE]
    assert retention.hold(Holder("rollout", "late"), [FILE]) == [FILE]
    assert retention.why(FILE) == []
    retention.forget(0)
    assert not retention.is_given_up(FILE)
