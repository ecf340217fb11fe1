"""Times that the trainer went back to an earlier checkpoint."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """The versions of before, and a row for each time."""
    op.add_column("runs", sa.Column("policy_before", sa.BigInteger()))
    op.create_table(
        "returns",
        sa.Column("run_id", sa.String(128), nullable=False),
        sa.Column("lineage", sa.BigInteger(), nullable=False),
        sa.Column("report", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "lineage"),
    )
