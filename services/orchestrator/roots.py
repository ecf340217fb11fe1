"""The payload root of a run, opened or made. Both functions block."""

from contextlib import suppress

from services.orchestrator.config import OrchestratorSettings
from sideband.ids import RunId
from sideband.payload.errors import OtherRun
from sideband.payload.root import PayloadRoot


def run_root(settings: OrchestratorSettings, *, is_fresh: bool, is_known: bool) -> PayloadRoot:
    """The root; that of a known run must be there. Raises what ``PayloadRoot`` raises."""
    assert settings.payload_root is not None, "asked only with one"
    run_id = RunId(settings.run_id)
    if is_known:
        return PayloadRoot.open(settings.payload_root, run_id=run_id)
    return PayloadRoot.create(settings.payload_root, run_id, fresh=is_fresh)


def prepare_root(settings: OrchestratorSettings) -> None:
    """The folder and its marker, so that the ledger can lie beside it; nothing is wiped yet."""
    assert settings.payload_root is not None, "a ledger in the root needs one"
    with suppress(OtherRun):  # that is for whoever leads to refuse, or to wipe
        PayloadRoot.create(settings.payload_root, RunId(settings.run_id), fresh=False)
