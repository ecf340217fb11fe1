"""The ``sideband`` command, one file per command. Needs the extra ``cli`` (typer, rich)."""
