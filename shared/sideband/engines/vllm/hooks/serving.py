"""The hook on the token-in/token-out handler: its class is replaced by one derived from it.

``ServingTokens`` is looked up late, when the server builds its state, so that the replaced name is
what it finds. Its methods still do all the work; the arguments that are read here are checked by
name first (``versions``).
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextvars import ContextVar
from functools import cache
from http import HTTPStatus
from types import ModuleType
from typing import Any

from sideband.engines.vllm.errors import AskRefused
from sideband.engines.vllm.hooks.facts import read_facts, read_model_config
from sideband.engines.vllm.settings import PluginSettings
from sideband.engines.vllm.state import PluginState, Wish, start
from sideband.engines.vllm.turn import Turn
from sideband.engines.vllm.versions import HOOKS, SERVING_CLASS, Verdict, judge_hooks
from sideband.errors import SidebandError

Begin = Callable[[Any], PluginState]  # from vLLM's config

# From ``serve_tokens`` to the generator that it calls, within one request's own context.
_WISH: ContextVar[Wish] = ContextVar("sideband_wish")


def install(module: ModuleType, settings: PluginSettings, verdict: Verdict) -> None:
    """Replace the class in the module that defines it."""
    base = getattr(module, SERVING_CLASS)
    judged = judge_hooks(verdict, {name: getattr(base, name, None) for name in HOOKS})

    def begin(vllm_config: Any) -> PluginState:
        facts = read_facts(vllm_config, version=judged.version)
        return start(settings, judged, facts, read_model_config(vllm_config))

    replacing = refusing(base, begin)
    setattr(module, SERVING_CLASS, handling(replacing) if judged.is_known else replacing)


def refusing(base: Any, begin: Begin) -> Any:
    """A handler that touches nothing but requests by handle, and refuses those."""

    class RefusingServingTokens(base):  # type: ignore[misc]  # vLLM's class, known at run time
        """Serves as before; a request by handle gets the reason why not."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.sideband: PluginState = begin(self.engine_client.vllm_config)

        async def serve_tokens(
            self, request: Any, raw_request: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            """The server's answer, or a 400."""
            try:
                wish = await self.sideband.admit(
                    request.sampling_params.extra_args, request.request_id
                )
            except AskRefused as exc:
                return self.create_error_response(str(exc))
            _WISH.set(wish)
            return await super().serve_tokens(request, raw_request, *args, **kwargs)

    return RefusingServingTokens


def handling(admitting: Any) -> Any:
    """A handler whose answers carry rows by handle where ``admitting`` lets a request through."""

    class SidebandServingTokens(admitting):  # type: ignore[misc]  # as above
        """Takes rows off before they are encoded, and tells where they are."""

        async def serve_tokens_full_generator(
            self, request: Any, result_generator: Any, request_id: str, *args: Any, **kwargs: Any
        ) -> Any:
            """The server's answer with our members, once the file is durable; else a 500."""
            turn = self._turn(request, is_stream=False)
            answer = await super().serve_tokens_full_generator(
                request, turn.results(result_generator), request_id, *args, **kwargs
            )
            if not hasattr(answer, "choices"):  # an error of the server's own
                return answer
            try:
                members = await turn.members()
            except SidebandError as exc:
                status = HTTPStatus.INTERNAL_SERVER_ERROR
                return self.create_error_response(str(exc), "InternalServerError", status)
            return with_members(answer, members) if members else answer

        def serve_tokens_stream_generator(
            self, request: Any, result_generator: Any, request_id: str, *args: Any, **kwargs: Any
        ) -> AsyncIterator[str]:
            """The server's events; the one that ends the last choice carries our members."""
            turn = self._turn(request, is_stream=True)
            results = turn.results(result_generator)
            events: AsyncGenerator[str, None] = super().serve_tokens_stream_generator(
                request, results, request_id, *args, **kwargs
            )
            return turn.events(events, results)

        def _turn(self, request: Any, *, is_stream: bool) -> Turn:
            params = request.sampling_params
            return Turn(
                self.sideband,
                _WISH.get(),
                choices=params.n or 1,
                prompt_start=getattr(params, "routed_experts_prompt_start", None) or 0,
                is_stream=is_stream,
            )

    return SidebandServingTokens


def with_members(answer: Any, members: dict[str, Any]) -> Any:
    """The same answer with further members at its top level: fields inside choices are dropped."""
    kind: type = type(answer)
    return _open(kind).model_construct(**dict(answer), **members)


@cache
def _open(kind: type) -> Any:
    """A class that takes members which it does not declare, and is still one of the server's."""
    own = {"model_config": {"extra": "allow"}, "__module__": kind.__module__, "__doc__": ""}
    return type(kind)(kind.__name__, (kind,), own)
