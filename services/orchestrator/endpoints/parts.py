"""What every endpoint needs: the service of this term, and the errors that any may answer."""

from typing import Annotated, TypeVar

from fastapi import Depends, Path, Request

from services.orchestrator.errors import LedgerBehind, LedgerUnavailable, NotLeading
from services.orchestrator.service import Orchestrator
from services.orchestrator.terms import Terms
from sideband.ids import ID_PATTERN

V = TypeVar("V")


async def _service(request: Request) -> Orchestrator:
    terms = request.app.state.terms
    assert isinstance(terms, Terms), "the lifespan has built it"
    return terms.service()


Service = Annotated[Orchestrator, Depends(_service)]
EVERYWHERE = (LedgerUnavailable, LedgerBehind, NotLeading)
LeasePath = Annotated[
    str,
    Path(pattern=ID_PATTERN, description="The lease.", examples=["5f2c9a1b7d3e4f60a1b2c3d4"]),
]
RolloutPath = Annotated[
    str, Path(pattern=ID_PATTERN, description="The rollout.", examples=["g7.r0"])
]
StepPath = Annotated[int, Path(ge=1, le=(1 << 31) - 1, description="The step.", examples=[4])]


async def shown(service: Orchestrator, view: V) -> V:
    """``view`` of the state, once all that it shows is durable: no crash may take it back."""
    await service.settled()
    return view
