"""Where the ``sideband`` command begins: it comes with the library, what it needs does not."""

import sys
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Final

EXIT_ERROR: Final = 2
_EXTRA: Final = {"rich", "typer"}


def main() -> None:
    """Run the command of the command line; without the extra ``cli`` say how to get it."""
    with needing(_EXTRA, program="sideband", remedy="pip install 'sideband[cli]'"):
        from sideband.cli.app import main as run
    run()


@contextmanager
def needing(modules: AbstractSet[str], *, program: str, remedy: str) -> Iterator[None]:
    """Around imports: where one of ``modules`` is not installed, the process ends with a line that
    names it and ``remedy``.
    """
    try:
        yield
    except ModuleNotFoundError as exc:
        missing = (exc.name or "").split(".")[0]
        if missing not in modules:
            raise
        sys.stderr.write(f"{program}: needs {missing}: {remedy}\n")
        sys.exit(EXIT_ERROR)
