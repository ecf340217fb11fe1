"""What the endpoints work with, built once by ``app.py`` and kept on the application's state."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from services.inference_proxy.admission import Gate
from services.inference_proxy.asking import Asking
from services.inference_proxy.config import ProxySettings
from services.inference_proxy.engines import EngineBook
from services.inference_proxy.janitor import Janitor
from services.inference_proxy.keeping import Keeper
from services.inference_proxy.metrics import Metrics
from services.inference_proxy.openai import OpenAIService
from services.inference_proxy.openai_turns import OpenAITurns
from services.inference_proxy.payloads import RootHandle
from services.inference_proxy.probes import Probes
from services.inference_proxy.service import GenerateService
from services.inference_proxy.sessions import SessionBook
from services.inference_proxy.siblings import Siblings
from services.inference_proxy.turn_source import TurnSource
from services.inference_proxy.versions import VersionPusher
from services.inference_proxy.weights import WeightUpdates


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Services and state of one running proxy."""

    settings: ProxySettings
    book: EngineBook
    sessions: SessionBook
    root: RootHandle
    gate: Gate
    janitor: Janitor
    asking: Asking
    probes: Probes
    pusher: VersionPusher
    keeper: Keeper
    kept: TurnSource
    siblings: Siblings
    generate: GenerateService
    openai: OpenAIService
    turns: OpenAITurns
    weights: WeightUpdates
    metrics: Metrics


async def _parts(request: Request) -> Parts:
    parts = request.app.state.parts
    assert isinstance(parts, Parts), "the lifespan builds the parts"
    return parts


PartsDep = Annotated[Parts, Depends(_parts)]
