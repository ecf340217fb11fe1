"""Makes what the settings name: the engines, what is known at the start."""

import asyncio

from services.inference_proxy.config import ProxySettings
from services.inference_proxy.dialects.load import CannotPair, load_dialect
from services.inference_proxy.engine import Engine
from services.inference_proxy.engines import EngineBook
from services.inference_proxy.health import Health, HealthLimits
from sideband.model import ModelShape


def build_book(
    settings: ProxySettings, model: ModelShape | None, kind: type[EngineBook] = EngineBook
) -> EngineBook:
    """The engines, each with its dialect. Raises UnknownDialect, ModelNeeded, CannotPair."""
    limits = HealthLimits(
        failures_max=settings.ejection_failures,
        returns_min=settings.return_probes,
        backoff_s=settings.ejection_backoff_s,
        backoff_s_max=settings.ejection_backoff_s_max,
    )
    engines = [
        Engine(
            name=engine.name,
            url=engine.url,
            role=engine.role,
            payload_mount=settings.mount_of(engine),
            health=Health(limits=limits),
            dialect=load_dialect(engine.dialect, model),
            spills=engine.spill == "proxy",
        )
        for engine in settings.engines
    ]
    for engine in engines:
        if engine.role != "colocated" and engine.dialect.decode_continues_prefill:
            raise CannotPair(engine.name, engine.dialect.name)
    return kind(engines, policy_version=settings.policy_version, model=model)


def version_settled(settings: ProxySettings) -> asyncio.Event:
    """Set once the version on record is known: at once, where nobody has one."""
    settled = asyncio.Event()
    if settings.orchestrator_url is None:
        settled.set()
    return settled
