"""Samples in parts, so that no row is large."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """What an earlier version has written becomes the only part of its rollout, as it is."""
    op.create_table(
        "body_parts",
        sa.Column("run_id", sa.String(128), nullable=False),
        sa.Column("rollout_id", sa.String(128), nullable=False),
        sa.Column("part", sa.Integer(), nullable=False),
        sa.Column("parts", sa.Integer(), nullable=False),
        sa.Column("samples", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "rollout_id", "part"),
    )
    op.execute(
        "INSERT INTO body_parts (run_id, rollout_id, part, parts, samples) "
        "SELECT run_id, rollout_id, 0, 1, samples FROM bodies"
    )
    op.drop_table("bodies")
