"""In which phase a fault found a run."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Null for a run that goes on, and for one that an earlier version stopped."""
    op.add_column("runs", sa.Column("stopped_in", sa.String(16)))
