"""What one simulated engine is and which weaknesses of real ones it shows."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sideband.payload.encodings import DEFAULT_ENCODINGS, Encodings

Role = Literal["colocated", "prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """One engine process. Equal ``seed`` and model mean equal tokens, rows and masks.

    Rates are per request and drawn from its prompt, so that a run can be repeated. ``is_fragile``:
    a decode request below what was loaded kills the engine, as a real one dies.
    """

    name: str
    role: Role
    model: str = "sim-uint8"
    seed: int = 0
    host: str = "127.0.0.1"
    port: int = 8000
    payload_root: Path | None = None
    preemption_rate: float = 0.0
    disobedience_rate: float = 0.0  # decode returns rows from 0 although asked from P
    is_fragile: bool = False
    token_latency_s: float = 0.0
    returns_masks: bool = True
    encodings: Encodings = DEFAULT_ENCODINGS  # of its payload files
