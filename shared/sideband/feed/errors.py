"""What can go wrong between the orchestrator, the feed and a rank.

FeedError (sideband.errors)
├── MalformedStep           a step body or a chunk breaks the format: element, rule
├── UnreadableStep          a step body of another format version
├── MalformedFrame          a ZMQ message breaks the format: part, rule
├── UnsupportedProtocol     a ZMQ message of another protocol version
├── StepRefused             the feed does not take a step now, or ever
│   ├── OtherRunStep        it belongs to another run
│   ├── OtherLineageStep    the trainer went back while it was read: it is of before
│   ├── OtherGridStep       its grid, layout or model is not the feed's
│   ├── StepConflict        the same step with other content
│   ├── StepOutOfOrder      not the next step
│   ├── FeedFull            as many steps are held as may be: later
│   ├── FeedPaused          an operator paused the intake: later
│   └── FeedEnded           no more steps were promised
├── LineageConflict         the trainer went back otherwise, or again since
├── RankRefused             the feed does not take this rank: code, reason
├── BadKeyFile              a key file or folder that cannot be used: path, rule
├── CurveUnavailable        this build of libzmq has no CURVE
├── FeedTimeout             the feed, or a rank that it waits for, did nothing in time
├── StepFailed              one rank failed the step, so it fails on all
├── StepMissing             steps between what was committed and what came are gone
├── StepUnfinished          the trainer went on before it took every micro batch
├── ModelMismatch           the trainer's model is not the one that was sampled
├── NoPayloadRoot           rows come by handle and the trainer gave no payload root
├── RowsDisagree            rows of two fields that are about the same thing differ in length
├── RankReadFailed          rows could not be read, after all attempts: file, range, attempts
├── FeedClosed              close() was called
└── WrongProcess            made in one process and used in another: a fork has none of its threads
"""

from collections.abc import Sequence
from pathlib import Path

from sideband.errors import FeedError


class MalformedStep(FeedError):
    """A step body or chunk that no encoder writes. ``element`` names the place."""

    def __init__(self, element: str, rule: str) -> None:
        self.element, self.rule = element, rule
        super().__init__(f"{element}: {rule}")


class UnreadableStep(FeedError):
    """A step body of another version than this reader's."""

    def __init__(self, version: int, *, readable: int) -> None:
        self.version, self.readable = version, readable
        super().__init__(f"step format {version} is not readable here, only {readable}")


class MalformedFrame(FeedError):
    """A ZMQ message that the protocol does not know. ``part`` is prefix, header, body or frames."""

    def __init__(self, part: str, rule: str) -> None:
        self.part, self.rule = part, rule
        super().__init__(f"{part} frame: {rule}")


class UnsupportedProtocol(FeedError):
    """A ZMQ message of another protocol version."""

    def __init__(self, version: int, *, readable: int) -> None:
        self.version, self.readable = version, readable
        super().__init__(f"feed protocol {version} is not spoken here, only {readable}")


class StepRefused(FeedError):
    """The feed does not take a step. ``step`` says which."""

    def __init__(self, step: int, why: str) -> None:
        self.step = step
        super().__init__(f"step {step}: {why}")


class OtherRunStep(StepRefused):
    """The step belongs to another run than the feed."""

    def __init__(self, step: int, *, run_id: str, expected: str) -> None:
        self.run_id, self.expected = run_id, expected
        super().__init__(step, f"belongs to run {run_id}, this feed serves {expected}")


class OtherLineageStep(StepRefused):
    """The trainer went back while the step was read: what it was meant to follow is void."""

    def __init__(self, step: int, *, lineage: int, expected: int) -> None:
        self.lineage, self.expected = lineage, expected
        super().__init__(step, f"came in lineage {lineage}, the run is at lineage {expected}")


class OtherGridStep(StepRefused):
    """DP size, CP size, layout or model differ from the feed's."""

    def __init__(self, step: int, what: str, *, got: object, expected: object) -> None:
        self.what, self.got, self.expected = what, got, expected
        super().__init__(step, f"{what} is {got}, this feed has {expected}")


class StepConflict(StepRefused):
    """The step was taken before with other content."""

    def __init__(self, step: int) -> None:
        super().__init__(step, "was taken before with other content")


class StepOutOfOrder(StepRefused):
    """Steps come one by one: this is not the next."""

    def __init__(self, step: int, *, expected: int) -> None:
        self.expected = expected
        super().__init__(step, f"is out of order, the next is {expected}")


class FeedFull(StepRefused):
    """As many steps are held as may be. Safe to repeat later."""

    def __init__(self, step: int, *, held: int, blocking: Sequence[int] = ()) -> None:
        self.held, self.blocking = held, tuple(blocking)  # absent ranks that keep it full
        why = f"; not there: rank {', '.join(map(str, blocking))}" if blocking else ""
        super().__init__(step, f"{held} steps wait for the ranks, no more are held{why}")


class FeedPaused(StepRefused):
    """The intake is paused by an operator. Safe to repeat later."""

    def __init__(self, step: int) -> None:
        super().__init__(step, "the intake is paused")


class FeedEnded(StepRefused):
    """The orchestrator said that there are no more steps."""

    def __init__(self, step: int) -> None:
        super().__init__(step, "the feed has ended")


class LineageConflict(FeedError):
    """Told that the trainer went back, by somebody who does not know of a later time, or errs."""

    def __init__(self, lineage: int, step: int, *, known: tuple[int, int]) -> None:
        self.lineage, self.step, self.known = lineage, step, known
        super().__init__(
            f"lineage {lineage} from step {step}: known is lineage {known[0]} from step {known[1]}"
        )


class RankRefused(FeedError):
    """The feed refuses this rank. ``code`` is one of docs/feed-protocol.md."""

    def __init__(self, code: str, reason: str, *, retry_after_s: float | None = None) -> None:
        self.code, self.reason, self.retry_after_s = code, reason, retry_after_s
        super().__init__(f"{code}: {reason}")


class BadKeyFile(FeedError):
    """A key file or a folder of them that is missing, open to others, or no key at all."""

    def __init__(self, path: Path, rule: str) -> None:
        self.path, self.rule = path, rule
        super().__init__(f"key file {path}: {rule}")


class CurveUnavailable(FeedError):
    """Keys are asked for, and this build of libzmq has no CURVE."""

    def __init__(self) -> None:
        super().__init__("this build of libzmq has no CURVE: use one with libsodium")


class FeedTimeout(FeedError):
    """Nothing came in time. ``waiting_for`` are the ranks that the feed itself waits for."""

    def __init__(self, what: str, *, waited_s: float, waiting_for: tuple[int, ...] = ()) -> None:
        self.what, self.waited_s, self.waiting_for = what, waited_s, waiting_for
        blame = f"; the feed waits for ranks {list(waiting_for)}" if waiting_for else ""
        super().__init__(f"{what} did not come within {waited_s:.1f} s{blame}")


class StepFailed(FeedError):
    """The step failed on one rank, so every rank gives it up; restart from a committed step."""

    def __init__(self, step: int, reason: str) -> None:
        self.step, self.reason = step, reason
        super().__init__(f"step {step} failed: {reason}")


class StepMissing(FeedError):
    """The feed cannot give the steps that follow the committed one."""

    def __init__(self, *, expected: tuple[int, int], got: tuple[int, int]) -> None:
        self.expected, self.got = expected, got
        super().__init__(
            f"expected step {expected[0]} micro batch {expected[1]}, got step {got[0]} "
            f"micro batch {got[1]}"
        )


class StepUnfinished(FeedError):
    """The next step was asked for before every micro batch of the current one was taken."""

    def __init__(self, step: int, *, taken: int, count: int) -> None:
        self.step, self.taken, self.count = step, taken, count
        super().__init__(f"step {step}: only {taken} of {count} micro batches were taken")


class ModelMismatch(FeedError):
    """The trainer's model and the sampled one differ."""

    def __init__(self, *, own: object, sampled: object) -> None:
        self.own, self.sampled = own, sampled
        super().__init__(f"the trainer's model {own} is not the sampled one {sampled}")


class NoPayloadRoot(FeedError):
    """A micro batch by handle, and no payload root to read it from."""

    def __init__(self, step: int) -> None:
        self.step = step
        super().__init__(f"step {step} comes by handle: RankFeed needs payload_root")


class RowsDisagree(FeedError):
    """A field says one thing of each element of another one, and their rows differ in length."""

    def __init__(self, field: str, follows: str, *, row: int, counts: tuple[int, int]) -> None:
        self.field, self.follows, self.row, self.counts = field, follows, row, counts
        super().__init__(
            f"row {row} of {field} has {counts[0]} values, {follows} keeps {counts[1]} there"
        )


class RankReadFailed(FeedError):
    """Rows could not be read. The cause is the last attempt's error."""

    def __init__(self, file: str, *, rows: tuple[int, int], attempts: int, reason: str) -> None:
        self.file, self.rows, self.attempts, self.reason = file, rows, attempts, reason
        super().__init__(
            f"{file} rows [{rows[0]}, {rows[1]}): gave up after {attempts} attempts: {reason}"
        )


class FeedClosed(FeedError):
    """The feed was closed while something waited on it."""


class WrongProcess(FeedError):
    """A RankFeed that was made before a fork is used after it: its threads are not there."""

    def __init__(self, *, made_in: int, used_in: int) -> None:
        self.made_in, self.used_in = made_in, used_in
        super().__init__(
            f"a RankFeed of process {made_in} is used in process {used_in}: make it in the process "
            "that iterates, as RankFeedDataset does"
        )
