"""An embedded ledger is refused where its lock keeps no other host out."""

import os
from pathlib import Path

import pytest
from sqlalchemy import text
from structlog.testing import capture_logs

from services.orchestrator.ledger import LedgerFailed, LedgerMisplaced
from services.orchestrator.storage.ledger import SqlLedger
from services.orchestrator.storage.opening import LedgerPlace, open_ledger
from sideband.mounts import Mount
from tests.services.orchestrator.histories import SeededHistory

LOCAL_LOCKS = Mount(
    device="server:/a",
    point="/mnt/a",
    kind="nfs4",
    options=frozenset({"rw", "vers=4.2", "local_lock=all"}),
)
SERVERS_LOCKS = Mount(device="server:/a", point="/mnt/a", kind="nfs4")
SAYS_NOTHING = Mount(device="bucket", point="/mnt/b", kind="fuse.s3fs")


def place_in(folder: Path) -> LedgerPlace:
    return LedgerPlace(
        url=f"sqlite:///{folder}/ledger.sqlite3", run_id="run", name="n", lease_s=1.0
    )


async def test_a_mount_that_keeps_locks_to_its_host_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(LedgerMisplaced, match=r"/mnt/a \(nfs4\).*or use PostgreSQL"):
        await open_ledger(place_in(tmp_path), mount_at=lambda _: LOCAL_LOCKS)
    assert not os.listdir(tmp_path), "nothing was begun there"


@pytest.mark.parametrize(("mount", "warnings"), [(SERVERS_LOCKS, 0), (SAYS_NOTHING, 1)])
async def test_a_mount_that_does_not_say_is_warned_of(
    tmp_path: Path, mount: Mount, warnings: int
) -> None:
    asked: list[Path] = []

    def mount_at(path: Path) -> Mount:
        asked.append(path)
        return mount

    with capture_logs() as logs:
        ledger = await open_ledger(place_in(tmp_path), mount_at=mount_at)
        await ledger.close()
    assert asked == [tmp_path]
    found = [entry for entry in logs if entry["event"] == "ledger_locks_unknown"]
    assert len(found) == warnings
    assert all("sideband doctor" in entry["ask"] for entry in found)


async def test_what_a_database_says_of_a_failure_holds_no_row(tmp_path: Path) -> None:
    ledger = await open_ledger(place_in(tmp_path))
    assert isinstance(ledger, SqlLedger)
    async with ledger._connection.begin():
        await ledger._connection.execute(text("DROP TABLE leases"))
    with pytest.raises(LedgerFailed, match="no such table") as failed:
        await ledger.commit(list(SeededHistory(2).changes(10)))
    assert "hidden" in str(failed.value)
    await ledger.close()
