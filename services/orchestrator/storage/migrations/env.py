"""Alembic's entry: migrations run on the connection that ``migrate`` hands over."""

from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    version_table="ledger_schema",
    transaction_per_migration=False,
)
context.run_migrations()
