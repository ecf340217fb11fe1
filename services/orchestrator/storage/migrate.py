"""Brings a database to the newest schema. Safe for several processes that start at once."""

from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from services.orchestrator.ledger import LedgerTooNew

MIGRATIONS: Final = Path(__file__).parent / "migrations"
VERSION_TABLE: Final = "ledger_schema"
ADVISORY_LOCK: Final = 0x53424C4544474552  # "SBLEDGER": of this schema, not of a run


def migrate(connection: Connection) -> None:
    """Apply what is missing, in the caller's transaction. Raises LedgerTooNew.

    PostgreSQL: others wait for an advisory lock that ends with the transaction. SQLite: the caller
    has the file to itself.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": ADVISORY_LOCK})
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    _check_known(connection, ScriptDirectory.from_config(config))
    command.upgrade(config, "head")


def _check_known(connection: Connection, scripts: ScriptDirectory) -> None:
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
    found, known = context.get_current_revision(), [s.revision for s in scripts.walk_revisions()]
    if found is not None and found not in known:
        raise LedgerTooNew(found, newest=known[0])
