"""Files by their version alone, so that one file is never looked for by its run alone."""

from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """While a table is empty, PostgreSQL holds any index that begins with the run for a good way
    to one row of the run, and keeps that plan: each file that was deleted was then looked for
    among all files of the run.
    """
    op.drop_index("files_by_version", table_name="files")
    op.create_index("files_by_version", "files", ["policy_version"])
