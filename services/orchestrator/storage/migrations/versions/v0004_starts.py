"""Under which id a run was begun."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """One row for each run that is begun from now on."""
    op.create_table(
        "starts",
        sa.Column("run_id", sa.String(128), nullable=False),
        sa.Column("start_id", sa.String(128)),
        sa.Column("begun_s", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("run_id"),
    )
