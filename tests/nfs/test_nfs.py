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

import pytest

CLIENTS = ("198.18.0.2", "198.18.0.3")
MOUNT = "/mnt/nfs"
HOME = "opt/sideband-nfs-test"
NEEDED = {"numpy": "numpy.libs", "msgspec": "", "xxhash": "", "zmq": "pyzmq.libs"}
REPO = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(300)


class Hosts:
    """Runs ``tests.nfs.side`` on a client."""

    def __init__(self, at: str) -> None:
        self._at = shlex.split(at)

    def run(self, client: int, action: str, root: str, run_id: str) -> dict[str, Any]:
        command = f"cd /{HOME} && PYTHONDONTWRITEBYTECODE=1 python3 -m tests.nfs.side "
        done = subprocess.run(
            [*self._at, CLIENTS[client], f"{command} {action} {MOUNT}/{root} {run_id}"],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        lines = done.stdout.strip().splitlines()
        assert lines, "the command said nothing"
        assert lines[-1].startswith("{"), done.stdout
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
    for package in ("tests/__init__.py", "tests/nfs"):
        target = home / package
        target.parent.mkdir(parents=True, exist_ok=True)
        source = REPO / package
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    for name, libraries in NEEDED.items():
        folder = Path(str(import_module(name).__file__)).parent
        shutil.copytree(folder, home / name)
        if libraries and folder.with_name(libraries).exists():
            shutil.copytree(folder.with_name(libraries), home / libraries)
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
