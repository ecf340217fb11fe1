"""What the writer processes of ``test_concurrency`` run; importable by a spawned interpreter."""

import sys
from pathlib import Path

from sideband.payload import PayloadRoot
from tests.unit.payload.support import write_one


def write_many(path: str, number: int, count: int) -> None:
    """``count`` files of the one request that all processes share, seeds told apart."""
    root = PayloadRoot.open(Path(path))
    for index in range(count):
        write_one(root, 1000 * number + index)


if __name__ == "__main__":
    write_many(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
