"""A ledger in dictionaries: what was committed survives the book, and nothing else does."""

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

from services.orchestrator.ledger import Samples
from services.orchestrator.records import HELD_STATES, Change, Records, RolloutState
from services.orchestrator.retention import version_of
from services.orchestrator.storage import rows, tables
from services.orchestrator.storage.batch import Batch
from services.orchestrator.storage.samples import decode_samples, encode_samples
from sideband.ids import RolloutId


class PlainLedger:
    """Keeps rows by key; samples as the bytes that a database would keep."""

    is_durable = True

    def __init__(self) -> None:
        self.tables: dict[Any, dict[Any, dict[str, Any]]] = {t: {} for t in tables.OF_RUN}
        self.bodies: dict[RolloutId, bytes] = {}
        self.serials = count(1)
        self.saved_s = 0.0

    def apply(self, changes: Sequence[Change]) -> None:
        """Make all of ``changes`` durable."""
        batch = Batch(changes, self.serials)
        members, files = self.tables[tables.MEMBERS], self.tables[tables.FILES]
        for key in [key for key in members if key[0] in batch.groups_closed]:
            del members[key]
        for key in [key for key in files if version_of(key[0]) in batch.versions_forgotten]:
            del files[key]
        for table, writes in batch.writes.items():
            for key, row in writes.items():
                self.tables[table].pop(key, None)
                if row is not None:
                    self.tables[table][key] = row
        for rollout_id in batch.bodies_dropped:
            self.bodies.pop(rollout_id, None)
        for file in batch.files_deleted:
            if (file,) in files:
                files[file,]["is_pending"] = False
        for rollout_id, samples in batch.bodies.items():
            self.bodies[rollout_id] = encode_samples(samples)

    def records(self) -> Records | None:
        """Everything that was kept."""
        if not self.tables[tables.RUNS]:
            return None
        (run,) = self.tables[tables.RUNS].values()
        steps = [rows.read_step(row) for row in self._in_order(tables.STEPS)]
        built = {record.step for record in steps}
        return Records(
            run=rows.read_run(run),
            leases=[rows.read_lease(row) for row in self._in_order(tables.LEASES)],
            rollouts=[
                rows.read_rollout(row, self._samples_for(row, built))
                for row in self._in_order(tables.ROLLOUTS)
            ],
            groups=[rows.read_group(row) for row in self._in_order(tables.GROUPS)],
            members=[rows.read_member(row) for row in self.tables[tables.MEMBERS].values()],
            steps=steps,
            files={
                row["file"]: bool(row["is_pending"]) for row in self.tables[tables.FILES].values()
            },
            start=next((rows.read_start(row) for row in self.tables[tables.STARTS].values()), None),
            policies=[
                rows.read_policy(row)
                for row in sorted(
                    self.tables[tables.POLICIES].values(), key=lambda row: int(row["number"])
                )
            ],
            returns=[
                rows.read_return(row)
                for row in sorted(
                    self.tables[tables.RETURNS].values(), key=lambda row: int(row["lineage"])
                )
            ],
            saved_s=self.saved_s,
        )

    def _in_order(self, table: Any) -> list[dict[str, Any]]:
        return sorted(self.tables[table].values(), key=lambda row: int(row["serial"]))

    def _samples_for(self, row: dict[str, Any], built: set[int]) -> Any:
        state = RolloutState(row["state"])
        is_draft = state is RolloutState.PACKED and row["step"] not in built
        body = self.bodies.get(RolloutId(row["rollout_id"]))
        return decode_samples(body) if body and (state in HELD_STATES or is_draft) else ()

    async def commit(self, changes: Sequence[Change]) -> None:
        """As the protocol wants it."""
        self.apply(changes)

    async def load(self) -> Records | None:
        """As the protocol wants it."""
        return self.records()

    async def samples(self, rollout_ids: Iterable[RolloutId]) -> Samples:
        """As the protocol wants it."""
        return {name: decode_samples(self.bodies[name]) for name in rollout_ids}

    async def wipe(self) -> None:
        """As the protocol wants it."""
        self.__init__()  # type: ignore[misc]

    async def close(self) -> None:
        """As the protocol wants it."""
