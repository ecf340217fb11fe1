"""Which engine takes a request: pure.

A session stays with one engine by rendezvous hashing (its prefix cache is there; when an engine
comes or goes only that engine's sessions move); anything else goes to the engine with the least in
flight. Equal choices fall to the name, so that the choice is a function of its arguments.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from xxhash import xxh3_64_intdigest

from sideband.ids import SessionId


def choose(
    names: Sequence[str],
    *,
    in_flight: Mapping[str, int],
    session: SessionId | None = None,
    avoid: AbstractSet[str] = frozenset(),
) -> str | None:
    """The engine among ``names``, or None when there are none.

    ``avoid`` names engines that already failed this request: they are taken only when no other
    serves.
    """
    candidates = [name for name in names if name not in avoid] or list(names)
    if not candidates:
        return None
    if session is not None:
        return max(candidates, key=lambda name: (affinity(name, session), name))
    return min(candidates, key=lambda name: (in_flight.get(name, 0), name))


def affinity(name: str, session: SessionId) -> int:
    """Weight of an engine for a session; the same in every process."""
    return xxh3_64_intdigest(f"{name}\0{session}".encode())
