"""From numbers to words: fit, fit with a remark, or unfit, and what to do. Pure."""

from enum import StrEnum
from statistics import median
from typing import Final, NamedTuple

from sideband.doctor.messages import Report
from sideband.feed.reads import RetryPlan

FSYNC_SLOW_S: Final = 0.5  # an answer waits for it; beyond, it shows beside a turn of a few seconds
SKEW_S: Final = 1.0  # nothing is decided by two hosts' clocks; beyond, logs cannot be read together
READ_SLOW_BYTES_PER_S: Final = 200e6  # a rank's chunk of 12 MB in 60 ms, beside a step of seconds


_ADVICE: Final = (
    "mount with a shorter directory cache (NFS: lookupcache=pos, or a small acdirmin), or raise "
    "RankFeed's retry attempts"
)


class Level(StrEnum):
    """How bad a finding is."""

    GOOD = "good"
    REMARK = "remark"
    UNFIT = "unfit"


class Finding(NamedTuple):
    """One thing that was looked at: its figure, and what that means."""

    what: str
    figure: str
    level: Level
    words: str


def findings_of(report: Report, retry: RetryPlan | None = None) -> list[Finding]:
    """All findings, in the order in which a file lives. ``retry``: that of the ranks."""
    return [
        _hosts(report),
        _fsync(report),
        _visibility(report, retry or RetryPlan()),
        _early(report, retry or RetryPlan()),
        _rename(report),
        _reading(report),
        _deletion(report),
        _lock(report),
        _clocks(report),
    ]


def worst(findings: list[Finding]) -> Level:
    """The verdict on the whole."""
    levels = {finding.level for finding in findings}
    return next(level for level in (Level.UNFIT, Level.REMARK, Level.GOOD) if level in levels)


def retry_budget_s(retry: RetryPlan) -> float:
    """How long a rank keeps trying to read a file that it does not see."""
    return sum(retry.wait_s(attempt) for attempt in range(1, retry.attempts_max))


def _hosts(report: Report) -> Finding:
    figure = f"{report.lead.host}, {report.follow.host} ({report.filesystem})"
    if report.is_one_host:
        words = (
            "both sides ran on one host and share its caches: name a meeting and run the command "
            "on two hosts to learn what a rank elsewhere sees"
        )
        return Finding("hosts", figure, Level.REMARK, words)
    return Finding("hosts", figure, Level.GOOD, "two hosts")


def _fsync(report: Report) -> Finding:
    times = sorted(report.lead.fsync_s + report.follow.fsync_s)
    slow_s = times[int(0.99 * (len(times) - 1))]
    figure = f"{median(times) * 1e3:.1f} ms, p99 {slow_s * 1e3:.1f} ms"
    if slow_s > FSYNC_SLOW_S:
        words = "every answer of an engine waits for this; use a filesystem with a faster log"
        return Finding("write, fsync, rename", figure, Level.REMARK, words)
    return Finding("write, fsync, rename", figure, Level.GOOD, "an answer waits this long")


def _visibility(report: Report, retry: RetryPlan) -> Finding:
    what = "an announced file is there after"
    failed = [reply.error for reply in report.fresh if reply.error]
    if failed:
        return Finding(what, "never", Level.UNFIT, failed[0])
    delays = sorted(reply.seconds for reply in report.fresh)
    figure = f"{median(delays):.3f} s, at most {delays[-1]:.3f} s"
    budget_s = retry_budget_s(retry)
    if delays[-1] > budget_s:
        return Finding(
            what, figure, Level.UNFIT, f"ranks give up after {budget_s:.1f} s: {_ADVICE}"
        )
    if delays[-1] > budget_s / 4:
        words = f"reads repeat, and ranks give up after {budget_s:.1f} s: {_ADVICE}"
        return Finding(what, figure, Level.REMARK, words)
    return Finding(what, figure, Level.GOOD, f"ranks wait up to {budget_s:.1f} s")


def _early(report: Report, retry: RetryPlan) -> Finding:
    delays = sorted(echo.travel_s for echo in report.echoes)  # one way may take all of it
    figure = f"{median(delays):.3f} s, at most {delays[-1]:.3f} s"
    what, budget_s = "one asked for too early, after", retry_budget_s(retry)
    if delays[-1] > budget_s:
        words = (
            f"ranks ask for announced files only; after a miss they give up at {budget_s:.1f} s, "
            f"before this mount would show the file: {_ADVICE}"
        )
        return Finding(what, figure, Level.REMARK, words)
    return Finding(what, figure, Level.GOOD, "how long this mount remembers that a name was absent")


def _rename(report: Report) -> Finding:
    seen = report.watch
    figure = f"{seen.reads} reads, {seen.torn} torn, {seen.missing} missing, {seen.stale} stale"
    if seen.torn or seen.missing:
        words = "a rename must show the old file or the new one, whole: do not use this filesystem"
        return Finding("rename over a file", figure, Level.UNFIT, words)
    if not seen.reads:
        return Finding("rename over a file", figure, Level.UNFIT, "the file could not be read")
    return Finding("rename over a file", figure, Level.GOOD, "always whole")


def _reading(report: Report) -> Finding:
    if report.read.error:
        return Finding("read by 32 threads", "failed", Level.UNFIT, report.read.error)
    speed = report.read_bytes / max(report.read.seconds, 1e-9)
    figure = f"{speed / 1e6:,.0f} MB/s"
    if report.is_one_host:
        return Finding("read by 32 threads", figure, Level.GOOD, "from this host's own cache")
    if speed < READ_SLOW_BYTES_PER_S:
        words = "reads of the next micro batch may last longer than training on this one"
        return Finding("read by 32 threads", figure, Level.REMARK, words)
    return Finding("read by 32 threads", figure, Level.GOOD, "a file that the other side wrote")


def _deletion(report: Report) -> Finding:
    what = "read a file that was deleted"
    if not report.hold.error:
        return Finding(what, "works", Level.GOOD, "an open file stays readable")
    words = "Sideband deletes no file that a rank still needs; a late reader gets a named error"
    return Finding(what, report.hold.error, Level.GOOD, words)


def _lock(report: Report) -> Finding:
    what = "a lock refuses the other side"
    if not report.lock.error:
        return Finding(what, "works", Level.GOOD, "the embedded ledger may lie here")
    words = (
        "payload files need no locks, but an embedded ledger does: set "
        "SIDEBAND_ORCHESTRATOR_LEDGER_URL to a local disk, or to PostgreSQL"
    )
    return Finding(what, report.lock.error, Level.REMARK, words)


def _clocks(report: Report) -> Finding:
    best = min(report.echoes, key=lambda echo: echo.travel_s)
    figure = f"{best.skew_s:+.3f} s (± {best.travel_s / 2:.3f} s)"
    if abs(best.skew_s) - best.travel_s / 2 > SKEW_S:
        words = "nothing is decided by two clocks, but logs cannot be read together: run NTP"
        return Finding("clocks differ by", figure, Level.REMARK, words)
    return Finding("clocks differ by", figure, Level.GOOD, "close enough to read logs together")
