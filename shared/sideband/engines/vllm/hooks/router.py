"""The hook on the handler's router: one more route, beside the one it tells about.

``GET /inference/v1/sideband`` says whether requests go by handle here, for which model, which run
and which policy version, so that a proxy can compare before it sends work. The server's API key
guards the prefix.
"""

from types import ModuleType
from typing import Any, Final

from sideband.engines.vllm.hooks.facts import read_weight_version

PATH: Final = "/inference/v1/sideband"


def install(module: ModuleType) -> None:
    """Add the route to the router before the server includes it."""

    async def show(request: Any) -> Any:
        handler = module.generate_tokens(request)
        state = getattr(handler, "sideband", None)
        if state is None:
            return module.JSONResponse({"error": "this server generates nothing"}, 404)
        version = await read_weight_version(handler.engine_client)
        return module.JSONResponse(await state.shown(weight_version=version))

    module.router.add_route(PATH, show, methods=["GET"], include_in_schema=False)
