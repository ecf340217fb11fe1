"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def _id(name: str) -> "sa.Column[str]":
    return sa.Column(name, sa.String(128), nullable=False)


def upgrade() -> None:
    """Runs, leaders, work, steps, files."""
    _runs()
    _leases_and_rollouts()
    _groups()
    _steps_and_files()


def _runs() -> None:
    op.create_table(
        "runs",
        _id("run_id"),
        sa.Column("phase", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("leases_until_s", sa.Double()),
        sa.Column("drain_until_s", sa.Double()),
        sa.Column("policy_version", sa.BigInteger()),
        sa.Column("policy_applied", sa.BigInteger(), nullable=False),
        sa.Column("next_step", sa.BigInteger(), nullable=False),
        sa.Column("next_lease_index", sa.BigInteger(), nullable=False),
        sa.Column("next_ready_index", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("run_id"),
    )
    op.create_table(
        "saves",
        _id("run_id"),
        sa.Column("saved_s", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("run_id"),
    )
    op.create_table(
        "leaders",
        _id("run_id"),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("leader", sa.Text(), nullable=False),
        sa.Column("expires_s", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("run_id"),
    )


def _leases_and_rollouts() -> None:
    op.create_table(
        "leases",
        _id("run_id"),
        _id("lease_id"),
        _id("rollout_id"),
        _id("group_id"),
        sa.Column("group_size", sa.Integer(), nullable=False),
        sa.Column("env_name", sa.Text(), nullable=False),
        sa.Column("session_id", sa.String(128)),
        sa.Column("policy_version", sa.BigInteger(), nullable=False),
        sa.Column("dispatch_index", sa.BigInteger(), nullable=False),
        sa.Column("taken_s", sa.Double(), nullable=False),
        sa.Column("deadline_s", sa.Double(), nullable=False),
        sa.Column("files", sa.Text(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("serial", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "lease_id"),
    )
    op.create_table(
        "rollouts",
        _id("run_id"),
        _id("rollout_id"),
        _id("group_id"),
        sa.Column("policy_version", sa.BigInteger(), nullable=False),
        sa.Column("dispatch_index", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reward", sa.Double()),
        sa.Column("advantage", sa.Double()),
        sa.Column("files", sa.Text(), nullable=False),
        sa.Column("files_shared", sa.Text(), nullable=False),
        sa.Column("tally", sa.Text(), nullable=False),
        sa.Column("reason", sa.String(32)),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("refusal", sa.String(64)),
        sa.Column("step", sa.BigInteger()),
        sa.Column("ready_index", sa.BigInteger()),
        sa.Column("serial", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "rollout_id"),
    )
    op.create_table(
        "bodies",
        _id("run_id"),
        _id("rollout_id"),
        sa.Column("samples", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "rollout_id"),
    )


def _groups() -> None:
    op.create_table(
        "groups",
        _id("run_id"),
        _id("group_id"),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("touched_s", sa.Double(), nullable=False),
        sa.Column("is_closed", sa.Boolean(), nullable=False),
        sa.Column("files", sa.Text(), nullable=False),
        sa.Column("serial", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "group_id"),
    )
    op.create_table(
        "members",
        _id("run_id"),
        _id("group_id"),
        _id("rollout_id"),
        sa.Column("dispatch_index", sa.BigInteger(), nullable=False),
        sa.Column("is_open", sa.Boolean(), nullable=False),
        sa.Column("is_delivered", sa.Boolean(), nullable=False),
        sa.Column("reward", sa.Double()),
        sa.PrimaryKeyConstraint("run_id", "group_id", "rollout_id"),
    )


def _steps_and_files() -> None:
    op.create_table(
        "steps",
        _id("run_id"),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("rollout_ids", sa.Text(), nullable=False),
        sa.Column("files", sa.Text(), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("micro_batches", sa.Integer(), nullable=False),
        sa.Column("tally", sa.Text(), nullable=False),
        sa.Column("built_s", sa.Double(), nullable=False),
        sa.Column("acknowledged_s", sa.Double()),
        sa.Column("serial", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "step"),
    )
    op.create_table(
        "files",
        _id("run_id"),
        sa.Column("file", sa.String(512), nullable=False),
        sa.Column("policy_version", sa.BigInteger(), nullable=False),
        sa.Column("is_pending", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "file"),
    )
    op.create_index("files_by_version", "files", ["run_id", "policy_version"])
