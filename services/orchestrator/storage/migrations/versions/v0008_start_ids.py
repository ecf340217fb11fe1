"""Under which ids processes were started, in the order in which the ledger first saw them."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Of starts before this version nothing is known: the first that comes is the first."""
    op.create_table(
        "start_ids",
        sa.Column("run_id", sa.String(128), nullable=False),
        sa.Column("start_id", sa.String(128), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "start_id"),
    )
