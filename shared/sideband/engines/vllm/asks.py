"""What one request asks the plugin for, by its ``extra_args``.

``payload_dir``: write the rows there and answer segments. ``payload_run_id``: of this run (the
root's marker says by default). ``payload_debug``: answer inline too, with every layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sideband.engines.vllm.errors import AskRefused
from sideband.errors import SidebandError
from sideband.ids import RequestId, RunId, check_id
from sideband.payload.durable import DurableFolders
from sideband.payload.paths import version_of_folder
from sideband.payload.root import PayloadRoot

PAYLOAD_DIR: Final = "payload_dir"
RUN_ID: Final = "payload_run_id"
DEBUG: Final = "payload_debug"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a request wants its file, by name only: nothing was looked at."""

    root: Path
    policy_version: int
    run_id: RunId | None
    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """``place`` is None for an inline answer."""

    place: Place | None
    is_debug: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An opened root, and what the file in it is called by."""

    root: PayloadRoot
    policy_version: int
    request_id: RequestId


def read_ask(extra_args: Mapping[str, object] | None, *, root: Path | None, request_id: str) -> Ask:
    """Pure. The folder must be ``v<k>`` right below this engine's own root. Raises AskRefused."""
    extra = extra_args or {}
    is_debug = extra.get(DEBUG, False)
    if not isinstance(is_debug, bool):
        raise AskRefused(DEBUG, "must be true or false")
    wanted = extra.get(PAYLOAD_DIR)
    if wanted is None:
        return Ask(place=None, is_debug=is_debug)
    if root is None:
        raise AskRefused(
            PAYLOAD_DIR, "this engine has no payload root; set SIDEBAND_VLLM_PAYLOAD_ROOT"
        )
    if not isinstance(wanted, str) or "\x00" in wanted:
        raise AskRefused(PAYLOAD_DIR, "must be a path")
    folder = Path(wanted)
    policy_version = version_of_folder(folder.name)
    # By name, not resolved: what lies below is walked by descriptors that follow no link.
    if folder.parent != root or policy_version is None:
        raise AskRefused(PAYLOAD_DIR, f"must be v<k> in this engine's root, {shown(wanted)} is not")
    run_id = extra.get(RUN_ID)
    try:
        return Ask(
            place=Place(
                root=root,
                policy_version=policy_version,
                run_id=None if run_id is None else RunId(check_id(RUN_ID, run_id)),
                request_id=RequestId(check_id("request_id", request_id)),
            ),
            is_debug=is_debug,
        )
    except SidebandError as exc:
        raise AskRefused(RUN_ID if "run_id" in str(exc) else PAYLOAD_DIR, str(exc)) from exc


def open_target(place: Place, *, durable: DurableFolders) -> Target:
    """Look at the root's marker. Blocks: use a thread. Raises AskRefused."""
    try:
        root = PayloadRoot.open(place.root, run_id=place.run_id, durable=durable)
    except SidebandError as exc:
        raise AskRefused(PAYLOAD_DIR, str(exc)) from exc
    return Target(root=root, policy_version=place.policy_version, request_id=place.request_id)


def shown(text: str) -> str:
    """A client's text as an error may repeat it."""
    return repr(text if len(text) <= 100 else text[:97] + "...")
