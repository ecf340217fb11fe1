"""Alembic's entry: migrations run on the connection that ``migrate`` hands over."""

from alembic import context

from services.orchestrator.storage.migrate import VERSION_TABLE

context.configure(
    connection=context.config.attributes["connection"],
    version_table=VERSION_TABLE,
    transaction_per_migration=False,
)
context.run_migrations()
