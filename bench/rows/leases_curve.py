"""The orchestrator's decisions with ever more rollouts in flight."""

from typing import Final

from bench.registry import Row
from bench.results import Claim, Curve, RowResult, Series
from bench.rows.curves import EXPONENT_MAX, Points, growth
from bench.scale import Scale
from bench.timing import timed
from services.orchestrator import leasing
from services.orchestrator.book import Book
from services.orchestrator.leasing import LeaseRequest
from services.orchestrator.membership import StepSize
from services.orchestrator.records import Change
from services.orchestrator.rules import Rules
from sideband.ids import GroupId, LeaseId, RolloutId, RunId

GROUP_SIZE: Final = 8
HISTORY_MAX: Final = 200
RULES: Final = Rules(
    run_id=RunId("bench"),
    step_size=StepSize(rollouts=512),
    max_off_policy_steps=4,
    is_deterministic=False,
    filter_zero_advantage=False,
    ship_last_partial_step=True,
    first_step=1,
    lease_timeout_s=3600.0,
    group_timeout_s=3600.0,
    policy_timeout_s=3600.0,
    leases_open_max=1_000_000,
    rollouts_held_max=1_000_000,
    steps_ahead_max=4,
    history_max=HISTORY_MAX,
)


def measure(scale: Scale) -> RowResult:
    """Leases taken, one taken and aborted beside those in flight, and one tick of expiry."""
    counts = scale.pick(
        tiny=[8, 16], quick=[100, 1_000, 10_000], full=[100, 300, 1_000, 3_000, 10_000, 30_000]
    )
    taking: Points = []
    churning: Points = []
    ticking: Points = []
    for count in counts:
        book = new_book()
        taking.append((count, timed(lambda b=book, n=count: take_all(b, 0, n)) * 1e3))  # type: ignore[misc]
        churn = scale.pick(tiny=4, quick=1_000, full=2_000)
        churning.append(
            (count, timed(lambda b=book, n=churn: churn_all(b, n)) / churn * 1e6)  # type: ignore[misc]
        )
        ticking.append((count, timed(lambda b=book: leasing.expire(b, Change(), 1.0)) * 1e3))  # type: ignore[misc]
    curves = [
        _curve("leases-take", "Taking leases", "ms", taking),
        _curve("leases-churn", "One lease taken and aborted", "µs", churning),
        _curve("leases-tick", "One tick of expiry", "ms", ticking),
    ]
    return RowResult(
        name="curve_leases",
        title="Growth with rollouts in flight",
        setting=f"{counts[0]} to {counts[-1]} open leases in groups of {GROUP_SIZE}, decisions "
        f"only, {HISTORY_MAX} ended leases remembered",
        claims=[
            Claim(
                what=f"exponent of {curve.title.lower()}",
                value=growth(curve.series[0].points),
                unit="",
                target=target,
                is_ceiling=True,
            )
            for curve, target in zip(curves, (EXPONENT_MAX, 0.15, EXPONENT_MAX), strict=True)
        ],
        curves=curves,
    )


def new_book() -> Book:
    """An empty run at v0."""
    book = Book(RULES)
    book.policy_version = 0
    return book


def take_all(book: Book, first: int, count: int) -> None:
    """``count`` new leases, whole groups together."""
    for serial in range(first, first + count):
        leasing.take(book, Change(), request(serial), LeaseId(f"lease-{serial}"), 0.0)


def churn_all(book: Book, count: int) -> None:
    """Leases that come and go while all others stay open."""
    for number in range(count):
        serial = 1_000_000 + number
        lease_id = LeaseId(f"lease-{serial}")
        leasing.take(book, Change(), request(serial), lease_id, 0.0)
        leasing.abort(book, Change(), lease_id, 0.0)


def request(serial: int) -> LeaseRequest:
    """What a client says."""
    return LeaseRequest(
        rollout_id=RolloutId(f"rollout-{serial}"),
        group_id=GroupId(f"group-{serial // GROUP_SIZE}"),
        group_size=GROUP_SIZE,
        env_name="code",
        session_id=None,
    )


def _curve(name: str, title: str, y_label: str, points: Points) -> Curve:
    return Curve(
        name=name,
        title=title,
        x_label="open leases",
        y_label=y_label,
        series=[Series(name=title, points=points)],
    )


ROWS: Final = [Row("curve_leases", measure)]
