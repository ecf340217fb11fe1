"""Two hosts on one kernel NFS export: what one publishes the other reads, right or not at all.

Needs two clients of an export: ``--nfs-at CMD`` runs "CMD ADDRESS COMMAND" on a client, and what
lies in ``--nfs-shared DIR`` here is seen at ``/`` there. Skipped by name without them.
"""

import json
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

CLIENTS = ("198.18.0.2", "198.18.0.3")
MOUNT = "/mnt/nfs"
HOME = "opt/sideband-nfs-test"
# What is copied there, with the folder of its shared libraries; the second line is the ledger's.
NEEDED = {"numpy": "numpy.libs", "msgspec": "", "xxhash": "", "zmq": "pyzmq.libs"} | dict.fromkeys(
    ("sqlalchemy", "aiosqlite", "alembic", "greenlet", "mako", "markupsafe", "structlog"), ""
)
SINGLE_FILES = ("typing_extensions",)
REPO = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(300)


class Hosts:
    """Runs the commands of this package on a client."""

    def __init__(self, at: str) -> None:
        self._at = shlex.split(at)

    def run(self, client: int, action: str, root: str, run_id: str) -> dict[str, Any]:
        return figures(self.begin(client, f"side {action} {MOUNT}/{root} {run_id}"))

    def begin(self, client: int, command: str) -> "subprocess.Popen[str]":
        there = f"cd /{HOME} && PYTHONDONTWRITEBYTECODE=1 python3 -m tests.nfs.{command}"
        return subprocess.Popen(
            [*self._at, CLIENTS[client], there], stdout=subprocess.PIPE, text=True
        )


def figures(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """The last JSON object that a command said."""
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    lines = [line for line in said.splitlines() if line.startswith("{")]
    assert lines, said
    found: dict[str, Any] = json.loads(lines[-1])
    return found


@pytest.fixture(scope="module")
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    at, shared = request.config.getoption("--nfs-at"), request.config.getoption("--nfs-shared")
    if not at or not shared:
        pytest.skip("no NFS clients: --nfs-at and --nfs-shared were not given")
    home = Path(shared) / HOME
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(REPO / "shared" / "sideband", home / "sideband")
    parts = ("tests/__init__.py", "tests/nfs", "services/__init__.py", "services/kit")
    for package in (*parts, "services/orchestrator"):
        target = home / package
        target.parent.mkdir(parents=True, exist_ok=True)
        source = REPO / package
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    for name, libraries in NEEDED.items():
        folder = Path(str(import_module(name).__file__)).parent
        shutil.copytree(folder, home / name, ignore=shutil.ignore_patterns("__pycache__"))
        if libraries and folder.with_name(libraries).exists():
            shutil.copytree(folder.with_name(libraries), home / libraries)
    for name in SINGLE_FILES:
        shutil.copy(str(import_module(name).__file__), home)
    yield Hosts(at)
    shutil.rmtree(home)


def test_what_one_host_publishes_the_other_reads_at_once(hosts: Hosts) -> None:
    assert hosts.run(0, "write", "root-a", "run-1") == {"written": 24}
    seen = hosts.run(1, "read", "root-a", "run-1")
    assert (seen["right"], seen["wrong"], seen["gone"]) == (24, 0, 0), seen
    again = hosts.run(1, "read", "root-a", "run-1")
    assert again["right"] == 24


def test_a_deleted_file_is_gone_or_right_and_never_wrong(hosts: Hosts) -> None:
    hosts.run(0, "write", "root-b", "run-1")
    assert hosts.run(1, "read", "root-b", "run-1")["right"] == 24
    assert hosts.run(0, "delete", "root-b", "run-1") == {"deleted": 3}
    seen = hosts.run(1, "read", "root-b", "run-1")
    assert seen["wrong"] == 0
    assert seen["right"] + seen["gone"] == 24
    assert seen["right"] >= 21, seen


def test_a_fresh_run_in_the_same_root_is_read_right_by_a_host_that_knew_the_old_one(
    hosts: Hosts,
) -> None:
    """Folders of the same names are others now: handles go stale, and reads are repeated."""
    hosts.run(0, "write", "root-c", "run-1")
    assert hosts.run(1, "read", "root-c", "run-1")["right"] == 24
    hosts.run(0, "write", "root-c", "run-2")
    seen = hosts.run(1, "read", "root-c", "run-2")
    assert (seen["right"], seen["wrong"], seen["gone"]) == (24, 0, 0), seen


def test_an_embedded_ledger_is_one_hosts_and_the_next_one_has_all_of_it(hosts: Hosts) -> None:
    """Its lock is the server's: seen by the other host, and gone with the process that had it."""
    file = f"{MOUNT}/ledger-{uuid4().hex}.sqlite3"
    holding = hosts.begin(0, f"ledger_side hold {file}")
    refused = figures(hosts.begin(1, f"ledger_side late {file}"))
    assert "open in another process" in refused["in_use"], refused
    acknowledged = figures(holding)["acknowledged"]
    assert acknowledged > 10
    assert figures(hosts.begin(1, f"ledger_side open {file}")) == {"found": acknowledged}
