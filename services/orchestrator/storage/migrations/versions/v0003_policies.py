"""Policy versions that the engines have served."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """A row for each change of the version."""
    op.create_table(
        "policies",
        sa.Column("run_id", sa.String(128), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("policy_version", sa.BigInteger(), nullable=False),
        sa.Column("lineage", sa.BigInteger(), nullable=False),
        sa.Column("applied_s", sa.Double(), nullable=False),
        sa.Column("trained_s", sa.Double()),
        sa.Column("source", sa.String(16), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "number"),
    )
