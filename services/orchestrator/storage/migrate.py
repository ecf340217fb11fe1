"""Brings a database to the newest schema. Safe for several processes that start at once."""

from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, text

MIGRATIONS: Final = Path(__file__).parent / "migrations"
ADVISORY_LOCK: Final = 0x53424C4544474552  # "SBLEDGER": of this schema, not of a run


def migrate(connection: Connection) -> None:
    """Apply what is missing, in the caller's transaction.

    PostgreSQL: others wait for an advisory lock that ends with the transaction. SQLite: the caller
    has the file to itself.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": ADVISORY_LOCK})
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
