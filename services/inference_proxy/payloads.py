"""The proxy's view of the payload root, which the orchestrator creates and may create later."""

from pathlib import Path

from sideband.errors import PayloadError
from sideband.ids import RunId
from sideband.payload.durable import DurableFolders
from sideband.payload.root import PayloadRoot


class RootNotReady(Exception):
    """The payload root is configured and cannot be used yet, or belongs to another run by now."""


class RootHandle:
    """The root once its marker is there. ``refresh`` blocks; the rest is memory."""

    def __init__(self, path: Path | None, *, run_id: str | None) -> None:
        self._path = path
        self._wanted_run = None if run_id is None else RunId(run_id)
        self._durable = DurableFolders()  # the root is opened often, what was synced is kept
        self.current: PayloadRoot | None = None
        self.problem: str | None = None if path is None else "the payload root was not read yet"

    @property
    def is_set(self) -> bool:
        """Whether train requests go by handle."""
        return self._path is not None

    def refresh(self) -> PayloadRoot | None:
        """Read the marker again: a fresh run may have taken the root over.

        A root that can no longer be read stays known (deletes then fail one by one), only a
        marker of another run than the configured one is a change of mind.
        """
        if self._path is None:
            return None
        try:
            self.current = PayloadRoot.open(
                self._path, run_id=self._wanted_run, durable=self._durable
            )
            self.problem = None
        except PayloadError as exc:
            self.problem = str(exc)
        return self.current
