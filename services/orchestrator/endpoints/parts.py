"""What every endpoint needs: the service that the app built."""

from typing import Annotated

from fastapi import Depends, Path, Request

from services.orchestrator.service import Orchestrator
from sideband.ids import ID_PATTERN


def _service(request: Request) -> Orchestrator:
    service = request.app.state.service
    assert isinstance(service, Orchestrator), "the lifespan has built it"
    return service


Service = Annotated[Orchestrator, Depends(_service)]
LeasePath = Annotated[
    str,
    Path(pattern=ID_PATTERN, description="The lease.", examples=["5f2c9a1b7d3e4f60a1b2c3d4"]),
]
RolloutPath = Annotated[
    str, Path(pattern=ID_PATTERN, description="The rollout.", examples=["g7.r0"])
]
StepPath = Annotated[int, Path(ge=1, le=(1 << 31) - 1, description="The step.", examples=[4])]
