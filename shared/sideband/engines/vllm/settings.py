"""Settings of the plugin, read once from ``SIDEBAND_VLLM_*`` of the server's environment.

An unknown variable under the prefix, or a value out of range, stops the server at its start.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sideband.errors import InvalidInput
from sideband.payload.encodings import DEFAULT_ENCODINGS, ROUTING_ENCODINGS, Encodings

PREFIX: Final = "SIDEBAND_VLLM_"
WRITE_THREADS_MAX: Final = 64
_MINOR: Final = re.compile(r"[0-9]{1,3}\.[0-9]{1,4}")
NAMES: Final = ("PAYLOAD_ROOT", "WRITE_THREADS", "ACCEPT_VERSION", "ROUTING_ENCODING")


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSettings:
    """``payload_root`` is where this engine mounts the root; without one all stays inline.

    ``accept_version`` (``"0.34"``) accepts one vLLM version that this release does not know.
    """

    payload_root: Path | None = None
    write_threads: int = 4  # files being synced at a time; the disk waits, not the CPU
    accept_version: str | None = None
    encodings: Encodings = DEFAULT_ENCODINGS  # of the files


def read_settings(variables: Mapping[str, str]) -> PluginSettings:
    """The settings in an environment. Raises InvalidInput, which names the variable."""
    own = {
        name.removeprefix(PREFIX): value
        for name, value in variables.items()
        if name.startswith(PREFIX) and value != ""
    }
    stray = sorted(own.keys() - set(NAMES))
    if stray:
        raise InvalidInput(PREFIX + stray[0], own[stray[0]], f"must be one of {', '.join(NAMES)}")
    root = own.get("PAYLOAD_ROOT")
    if root is not None and not Path(root).is_absolute():
        raise InvalidInput(f"{PREFIX}PAYLOAD_ROOT", root, "must be an absolute path")
    threads = own.get("WRITE_THREADS", "4")
    if not threads.isdecimal() or not 1 <= int(threads) <= WRITE_THREADS_MAX:
        rule = f"must lie in [1, {WRITE_THREADS_MAX}]"
        raise InvalidInput(f"{PREFIX}WRITE_THREADS", threads, rule)
    version = own.get("ACCEPT_VERSION")
    if version is not None and not _MINOR.fullmatch(version):
        raise InvalidInput(f"{PREFIX}ACCEPT_VERSION", version, 'must be like "0.34"')
    encoding = own.get("ROUTING_ENCODING", DEFAULT_ENCODINGS.routing)
    if encoding not in ROUTING_ENCODINGS:
        rule = f"must be one of {', '.join(sorted(ROUTING_ENCODINGS))}"
        raise InvalidInput(f"{PREFIX}ROUTING_ENCODING", encoding, rule)
    return PluginSettings(
        payload_root=None if root is None else Path(root),
        write_threads=int(threads),
        accept_version=version,
        encodings=Encodings(routing=encoding),
    )


def server_settings() -> PluginSettings:
    """The settings of this process. Raises InvalidInput."""
    return read_settings(os.environ)
