"""Where the ``sideband`` command begins: it comes with the library, what it needs does not."""

import sys
from typing import Final

EXIT_ERROR: Final = 2
_EXTRA: Final = {"rich", "typer"}


def main() -> None:
    """Run the command of the command line; without the extra ``cli`` say how to get it."""
    try:
        from sideband.cli.app import main as run
    except ModuleNotFoundError as exc:
        missing = (exc.name or "").split(".")[0]
        if missing not in _EXTRA:
            raise
        sys.stderr.write(f"sideband: needs {missing}: pip install 'sideband[cli]'\n")
        sys.exit(EXIT_ERROR)
    run()
