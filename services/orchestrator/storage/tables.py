"""The tables of the ledger. Every row belongs to a run; migrations make them (``migrations``).

``serial`` counts changes of one run: it keeps the order in which records changed last, which
decides what is forgotten first. Lists and tallies are JSON. Times are Unix seconds.
"""

from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)

METADATA: Final = MetaData()


def _id(name: str, *, is_key: bool = False) -> Column[str]:
    """An id on the wire: up to 128 bytes of ASCII."""
    return Column(name, String(128), primary_key=is_key, nullable=False)


def _run() -> Column[str]:
    return _id("run_id", is_key=True)


RUNS: Final = Table(
    "runs",
    METADATA,
    _run(),
    Column("phase", String(16), nullable=False),
    Column("reason", Text, nullable=False),
    Column("stopped_in", String(16)),
    Column("leases_until_s", Double),
    Column("drain_until_s", Double),
    Column("policy_version", BigInteger),
    Column("policy_applied", BigInteger, nullable=False),
    Column("policy_before", BigInteger),
    Column("next_step", BigInteger, nullable=False),
    Column("next_lease_index", BigInteger, nullable=False),
    Column("next_ready_index", BigInteger, nullable=False),
)
SAVES: Final = Table(  # when something was made durable last: the start of a downtime
    "saves",
    METADATA,
    _run(),
    Column("saved_s", Double, nullable=False),
)
STARTS: Final = Table(  # what began the run
    "starts",
    METADATA,
    _run(),
    Column("start_id", String(128)),
    Column("begun_s", Double, nullable=False),
)
START_IDS: Final = Table(  # of every process, whether it led or stood by; outlives a wipe
    "start_ids",
    METADATA,
    _run(),
    _id("start_id", is_key=True),
    Column("number", BigInteger, nullable=False),
)
LEADERS: Final = Table(  # PostgreSQL: who leads, and until when
    "leaders",
    METADATA,
    _run(),
    Column("fence", BigInteger, nullable=False),
    Column("leader", Text, nullable=False),
    Column("expires_s", Double, nullable=False),
)
LEASES: Final = Table(
    "leases",
    METADATA,
    _run(),
    _id("lease_id", is_key=True),
    _id("rollout_id"),
    _id("group_id"),
    Column("group_size", Integer, nullable=False),
    Column("env_name", Text, nullable=False),
    Column("session_id", String(128)),
    Column("policy_version", BigInteger, nullable=False),
    Column("dispatch_index", BigInteger, nullable=False),
    Column("taken_s", Double, nullable=False),
    Column("deadline_s", Double, nullable=False),
    Column("files", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("reason", Text, nullable=False),
    Column("serial", BigInteger, nullable=False),
)
ROLLOUTS: Final = Table(
    "rollouts",
    METADATA,
    _run(),
    _id("rollout_id", is_key=True),
    _id("group_id"),
    Column("policy_version", BigInteger, nullable=False),
    Column("dispatch_index", BigInteger, nullable=False),
    Column("digest", String(64), nullable=False),
    Column("state", String(16), nullable=False),
    Column("reward", Double),
    Column("advantage", Double),
    Column("files", Text, nullable=False),
    Column("files_shared", Text, nullable=False),
    Column("tally", Text, nullable=False),
    Column("reason", String(32)),
    Column("detail", Text, nullable=False),
    Column("refusal", String(64)),
    Column("step", BigInteger),
    Column("ready_index", BigInteger),
    Column("serial", BigInteger, nullable=False),
)
BODIES: Final = Table(  # samples of rollouts that may still have to be packed, again or at all
    "body_parts",
    METADATA,
    _run(),
    _id("rollout_id", is_key=True),
    Column("part", Integer, primary_key=True, nullable=False, autoincrement=False),
    Column("parts", Integer, nullable=False),  # how many the rollout has
    Column("samples", LargeBinary, nullable=False),
)
GROUPS: Final = Table(
    "groups",
    METADATA,
    _run(),
    _id("group_id", is_key=True),
    Column("size", Integer, nullable=False),
    Column("touched_s", Double, nullable=False),
    Column("is_closed", Boolean, nullable=False),
    Column("files", Text, nullable=False),
    Column("serial", BigInteger, nullable=False),
)
MEMBERS: Final = Table(
    "members",
    METADATA,
    _run(),
    _id("group_id", is_key=True),
    _id("rollout_id", is_key=True),
    Column("dispatch_index", BigInteger, nullable=False),
    Column("is_open", Boolean, nullable=False),
    Column("is_delivered", Boolean, nullable=False),
    Column("reward", Double),
)
STEPS: Final = Table(
    "steps",
    METADATA,
    _run(),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("state", String(16), nullable=False),
    Column("rollout_ids", Text, nullable=False),
    Column("files", Text, nullable=False),
    Column("digest", String(64), nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("micro_batches", Integer, nullable=False),
    Column("tally", Text, nullable=False),
    Column("built_s", Double, nullable=False),
    Column("acknowledged_s", Double),
    Column("serial", BigInteger, nullable=False),
)
FILES: Final = Table(  # given up: never held again; ``is_pending`` until the deletion is done
    "files",
    METADATA,
    _run(),
    Column("file", String(512), primary_key=True),
    Column("policy_version", BigInteger, nullable=False),
    Column("is_pending", Boolean, nullable=False),
    Index("files_by_version", "policy_version"),
)
RETURNS: Final = Table(  # times that the trainer went back, and what it did not get again
    "returns",
    METADATA,
    _run(),
    Column("lineage", BigInteger, primary_key=True, autoincrement=False),
    Column("report", Text, nullable=False),
)
POLICIES: Final = Table(  # what the engines served, and since when
    "policies",
    METADATA,
    _run(),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("policy_version", BigInteger, nullable=False),
    Column("lineage", BigInteger, nullable=False),
    Column("applied_s", Double, nullable=False),
    Column("trained_s", Double),
    Column("source", String(16), nullable=False),
)
# What belongs to the run and is wiped with it; who leads, and who came, stays.
OF_RUN: Final = (
    RUNS,
    SAVES,
    STARTS,
    LEASES,
    ROLLOUTS,
    BODIES,
    GROUPS,
    MEMBERS,
    STEPS,
    FILES,
    RETURNS,
    POLICIES,
)
