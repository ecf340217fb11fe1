"""Train requests on OpenAI routes, and what the proxy keeps of them."""

from pathlib import Path
from typing import Any

import msgspec

from services.kit.turns import TURNS_CONTENT_TYPE, TurnWire
from tests.services.inference_proxy.harness import Running, pair
from tests.services.inference_proxy.reading import routing_of
from tests.services.inference_proxy.stub import StubEngine

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
    TEXT: {"model": "m", "prompt": "Hello", "max_tokens": 4},
}


def train(session: str | None = "s1", version: str | None = None) -> dict[str, str]:
    headers = {"X-Sideband-Kind": "train"}
    if session is not None:
        headers["X-Sideband-Session"] = session
    if version is not None:
        headers["X-Sideband-Policy-Version"] = version
    return headers


async def kept_by(proxy: Running, request_id: str, choice: int = 0) -> TurnWire:
    """The turn that is kept under an answer's id."""
    asked = {"turns": [{"request_id": request_id, "choice": choice}]}
    headers = {"accept": TURNS_CONTENT_TYPE}
    answer = await proxy.http.post("/v1/turns/fetch", json=asked, headers=headers)
    assert answer.status_code == 200, answer.text
    (turn,) = msgspec.msgpack.decode(answer.content, type=list[TurnWire])
    return turn


def rows_in(turn: TurnWire, root: Path | None) -> dict[int, Any]:
    answer = {
        "choices": [{"routed_experts": turn.routed_experts}],
        "routed_experts_start": {"0": turn.routed_experts_prompt_start},
        "payload_segments": {"0": msgspec.to_builtins(turn.payload_segments or [])},
    }
    return routing_of(answer, root)


def engines_of(form: str, *, is_pair: bool) -> dict[str, StubEngine]:
    spills = form == "spill"
    return pair(spills=spills) if is_pair else {"e0": StubEngine(spills=spills)}
