"""From numbers to words: each threshold from both sides."""

from dataclasses import dataclass

import msgspec
import pytest

from sideband.doctor.findings import Level, findings_of, retry_budget_s, worst
from sideband.doctor.messages import Echo, Reply, Report, Side
from sideband.feed.reads import RetryPlan


def reply(**changes: object) -> Reply:
    return msgspec.structs.replace(Reply(received_s=0.0, replied_s=0.0), **changes)


def echo(*, travel_s: float, skew_s: float = 0.0) -> Echo:
    half_s = travel_s / 2
    received_s = 100.0 + half_s + skew_s
    return Echo(
        sent_s=100.0,
        received_s=received_s,
        replied_s=received_s + 5.0,  # the follower's own time must not count
        returned_s=100.0 + travel_s + 5.0,
    )


def report(**changes: object) -> Report:
    base = Report(
        lead=Side(host="a", boot_id="1", fsync_s=[0.01] * 20),
        follow=Side(host="b", boot_id="2", fsync_s=[0.01] * 20),
        filesystem="nfs4",
        fresh=[reply(seconds=0.01)] * 5,
        echoes=[echo(travel_s=0.1)] * 10,
        watch=reply(reads=100),
        read=reply(seconds=0.1),
        read_bytes=64 << 20,
        hold=reply(),
        lock=reply(),
    )
    return msgspec.structs.replace(base, **changes)


def test_two_hosts_with_good_numbers_are_fit() -> None:
    findings = findings_of(report())
    assert worst(findings) is Level.GOOD
    assert {finding.level for finding in findings} == {Level.GOOD}


@dataclass(frozen=True)
class Case:
    """What is changed, which finding shows it, and how bad it is."""

    changes: dict[str, object]
    what: str
    level: Level
    says: str


CASES = {
    "one host": Case(
        {"follow": Side(host="a", boot_id="1", fsync_s=[0.01])}, "hosts", Level.REMARK, "two hosts"
    ),
    "slow sync": Case(
        {"lead": Side(host="a", boot_id="1", fsync_s=[0.9] * 20)},
        "write, fsync, rename",
        Level.REMARK,
        "log",
    ),
    "late by a quarter of the patience": Case(
        {"fresh": [reply(seconds=0.1), reply(seconds=2.0)]},
        "an announced file is there after",
        Level.REMARK,
        "reads repeat",
    ),
    "later than ranks wait": Case(
        {"fresh": [reply(seconds=6.0)]}, "an announced file is there after", Level.UNFIT, "attempts"
    ),
    "never": Case(
        {"fresh": [reply(), reply(error="did not appear")]},
        "an announced file is there after",
        Level.UNFIT,
        "did not appear",
    ),
    "a miss is remembered for long": Case(
        {"echoes": [echo(travel_s=12.0)]},
        "one asked for too early, after",
        Level.REMARK,
        "lookupcache",
    ),
    "torn": Case({"watch": reply(reads=9, torn=1)}, "rename over a file", Level.UNFIT, "whole"),
    "missing": Case(
        {"watch": reply(reads=9, missing=1)}, "rename over a file", Level.UNFIT, "whole"
    ),
    "never read": Case(
        {"watch": reply(reads=0)}, "rename over a file", Level.UNFIT, "could not be read"
    ),
    "stale is retried": Case(
        {"watch": reply(reads=9, stale=3)}, "rename over a file", Level.GOOD, "whole"
    ),
    "short read": Case(
        {"read": reply(error="3 of 4 bytes")}, "read by 32 threads", Level.UNFIT, "3 of 4"
    ),
    "slow read": Case(
        {"read": reply(seconds=2.0)}, "read by 32 threads", Level.REMARK, "micro batch"
    ),
    "deleted file is gone": Case(
        {"hold": reply(error="Stale file handle")},
        "read a file that was deleted",
        Level.GOOD,
        "named",
    ),
    "a lock holds on one host only": Case(
        {"lock": reply(error="a lock of the other side is not seen")},
        "a lock refuses the other side",
        Level.REMARK,
        "PostgreSQL",
    ),
    "clocks apart": Case(
        {"echoes": [echo(travel_s=0.1, skew_s=-3.0)]}, "clocks differ by", Level.REMARK, "NTP"
    ),
    "clocks apart by less than can be known": Case(
        {"echoes": [echo(travel_s=0.1, skew_s=1.02)]}, "clocks differ by", Level.GOOD, "logs"
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_bad_number_is_said_in_words(case: Case) -> None:
    found = {finding.what: finding for finding in findings_of(report(**case.changes))}[case.what]
    assert (found.level, case.says in found.words) == (case.level, True), found


def test_the_patience_is_that_of_the_ranks() -> None:
    """A rank with more attempts makes the same filesystem fit."""
    late = report(fresh=[reply(seconds=6.0)])
    patient = RetryPlan(attempts_max=20)
    assert retry_budget_s(patient) > 24.0
    assert worst(findings_of(late)) is Level.UNFIT
    assert worst(findings_of(late, patient)) is Level.GOOD


def test_skew_and_travel_are_told_apart() -> None:
    one = echo(travel_s=0.4, skew_s=7.0)
    assert one.travel_s == pytest.approx(0.4)
    assert one.skew_s == pytest.approx(7.0)
