"""What one NFS client does with an embedded ledger: ``python -m tests.nfs.ledger_side ACT FILE``.

hold: opens the ledger, commits groups one by one, and dies by SIGKILL, its lock held.
late: waits until another process has begun to write it, then as open.
open: opens it and says how many it has; or that another process has it.
Each prints one JSON object of figures at the end.
"""

import asyncio
import json
import os
import signal
import sys
import time

from services.orchestrator.ledger import LedgerInUse
from services.orchestrator.records import Change, GroupRecord, RunRecord
from services.orchestrator.storage.opening import LedgerPlace, open_ledger
from sideband.ids import GroupId

HOLD_S = 12.0
BEGIN_S = 60.0
RUN = RunRecord(
    phase="running",
    reason="",
    leases_until_s=None,
    stopped_in=None,
    drain_until_s=None,
    policy_version=0,
    policy_before=None,
    policy_applied=0,
    next_step=1,
    next_lease_index=0,
    next_ready_index=0,
)


def place_at(file: str) -> LedgerPlace:
    return LedgerPlace(
        url=f"sqlite:///{file}", run_id="run", name="n", lease_s=1.0, busy_timeout_s=1.0
    )


async def hold(file: str) -> None:
    ledger = await open_ledger(place_at(file))
    count, end_s = 0, time.monotonic() + HOLD_S
    while time.monotonic() < end_s:
        group = GroupRecord(group_id=GroupId(f"g{count}"), size=1, touched_s=0.0, is_closed=False)
        await ledger.commit([Change(groups=[group], run=RUN)])
        count += 1
        await asyncio.sleep(0.02)
    sys.stdout.write(json.dumps({"acknowledged": count}) + "\n")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_log(file: str) -> None:
    """A listing asks the server, where a name that was absent once is remembered."""
    folder, name = os.path.split(f"{file}-wal")
    end_s = time.monotonic() + BEGIN_S
    while name not in os.listdir(folder):
        assert time.monotonic() < end_s, f"no {name} within {BEGIN_S} s"
        time.sleep(0.1)


async def opened(file: str) -> dict[str, object]:
    try:
        ledger = await open_ledger(place_at(file))
    except LedgerInUse as exc:
        return {"in_use": str(exc)}
    records = await ledger.load()
    await ledger.close()
    return {"found": 0 if records is None else len(records.groups)}


if __name__ == "__main__":
    action, file = sys.argv[1:]
    if action == "hold":
        asyncio.run(hold(file))
    if action == "late":
        wait_for_log(file)
    sys.stdout.write(json.dumps(asyncio.run(opened(file))) + "\n")
