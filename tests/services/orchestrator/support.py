"""An orchestrator in process: real payload files, stub feed and proxy, a hand-held clock."""

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from services.kit.app import ProblemApp
from services.kit.problems import MEDIA_TYPE
from services.orchestrator.app import create_app
from services.orchestrator.config import OrchestratorSettings
from services.orchestrator.ledger import Ledger
from services.orchestrator.service import Orchestrator
from services.orchestrator.terms import Terms
from sideband.engines.inline import decode_sampling_mask
from sideband.ids import RequestId, RunId
from sideband.model import ModelShape
from sideband.payload.columns import ChoicePayload, MaskColumn, RoutingRows
from sideband.payload.root import PayloadRoot
from sideband.payload.writer import write_payload
from tests.services.orchestrator.stubs import StubFeed, StubProxy

RUN = RunId("run-1")
HF_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 3,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [0],
    "decoder_sparse_step": 1,
    "vocab_size": 1000,
}
MODEL = ModelShape(num_layers=3, layer_ids=(1, 2), top_k=2, id_space=16, vocab_size=1000)
SETTLE_S = 5.0  # how long a test waits for background work before it fails


class ManualClock:
    """Time passes only when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Bench:
    """A running orchestrator and everything around it."""

    http: httpx.AsyncClient
    app: ProblemApp
    feed: StubFeed
    proxy: StubProxy
    clock: ManualClock
    root: PayloadRoot | None

    @property
    def service(self) -> Orchestrator:
        """The service behind the routes."""
        terms = self.app.state.terms
        assert isinstance(terms, Terms)
        return terms.service()

    async def lease(
        self, rollout_id: str, group_id: str | None = None, *, size: int = 1, **more: Any
    ) -> dict[str, Any]:
        """Take a lease; fails the test when it is refused."""
        body = {"rollout_id": rollout_id, "group_id": group_id or rollout_id, "group_size": size}
        answer = await self.http.post("/v1/leases", json={**body, **more})
        assert answer.status_code == 200, answer.text
        lease: dict[str, Any] = answer.json()
        return lease

    async def deliver(self, rollout_id: str, *turns: dict[str, Any], **more: Any) -> httpx.Response:
        """Deliver in JSON; completed, reward 1, unless told otherwise."""
        body: dict[str, Any] = {
            "rollout_id": rollout_id,
            "status": "completed",
            "turns": list(turns),
        }
        if not {"reward", "advantage"} & more.keys():
            body["reward"] = 1.0
        return await self.http.post("/v1/rollouts", json={**body, **more})

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        """Let background work go on until ``holds``."""
        try:
            async with asyncio.timeout(SETTLE_S):
                while not holds():  # noqa: ASYNC110 - what is waited for sets no event
                    await asyncio.sleep(0.002)
        except TimeoutError:
            raise AssertionError(f"never happened: {what}") from None

    async def until_metric(self, name: str, value: float) -> None:
        """Let background work go on until a metric has this value."""
        found = -1.0
        for _ in range(int(SETTLE_S / 0.01)):
            found = await self.metric(name)
            if found == value:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{name} is {found}, never became {value}")

    async def run(self) -> dict[str, Any]:
        """The run at a glance."""
        view: dict[str, Any] = (await self.http.get("/v1/run")).json()
        return view

    def on_disk(self) -> set[str]:
        """Every payload file of the run."""
        assert self.root is not None
        return {
            stored.file for version in self.root.versions() for stored in self.root.files(version)
        }

    async def metric(self, name: str) -> float:
        """One sample of ``/metrics``, with its labels as they are printed."""
        for line in (await self.http.get("/metrics")).text.splitlines():
            if line.startswith(name + " "):
                return float(line.rsplit(" ", 1)[1])
        return 0.0

    async def write(
        self, request_id: str, prompt: Sequence[int], completion: Sequence[int], **more: Any
    ) -> dict[str, Any]:
        """A turn by handle whose file an engine has written."""
        assert self.root is not None
        return await asyncio.to_thread(
            written_turn, self.root, request_id, prompt, completion, **more
        )


@asynccontextmanager
async def orchestrator(
    tmp_path: Path,
    *,
    by_handle: bool = True,
    with_proxy: bool = True,
    with_feed: bool = True,
    ledger: Ledger | None = None,
    feed: StubFeed | None = None,
    proxy: StubProxy | None = None,
    clock: ManualClock | None = None,
    wait_for_version: bool = True,
    **settings: Any,
) -> AsyncIterator[Bench]:
    """An orchestrator with fast loops; ``settings`` override. What is given outlives it."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(HF_CONFIG))
    root_path = tmp_path / "payloads"
    defaults: dict[str, Any] = {
        "run_id": RUN,
        "model_config_path": config,
        "payload_root": root_path if by_handle else None,
        "seq_len": 64,
        "step_rollouts": 1,
        "tick_s": 0.01,
        "feed_poll_s": 0.005,
        "proxy_poll_s": 0.01,
        "file_wait_s": 0.05,
        "feed_url": "http://feed" if with_feed else None,
        "proxy_url": "http://proxy" if with_proxy else None,
    }
    feed, proxy, clock = feed or StubFeed(), proxy or StubProxy(), clock or ManualClock()
    app = create_app(
        OrchestratorSettings(**{**defaults, **settings}),
        feed_transport=httpx.MockTransport(feed),
        proxy_transport=httpx.MockTransport(proxy),
        clock_s=clock,
        ledger=ledger,
    )
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://orchestrator", timeout=10) as http,
    ):
        root = PayloadRoot.open(root_path, run_id=RUN) if by_handle else None
        bench = Bench(http, app, feed, proxy, clock, root)
        if with_proxy and wait_for_version:
            await bench.until(
                lambda: bench.service.book.policy_version is not None, "the version is known"
            )
        yield bench


def routing_rows(start: int, stop: int) -> NDArray[np.uint8]:
    """Valid routing rows of positions [start, stop)."""
    first = (np.arange(start, stop)[:, None] + np.arange(2)) % 16
    return np.stack([first, (first + 5) % 16], axis=-1).astype(np.uint8)


def kept_sets(completion: Sequence[int], empty: Collection[int] = ()) -> list[list[int]]:
    """Each holds the sampled token and its successor, those numbered in ``empty`` nothing."""
    return [[] if i in empty else [token, token + 1] for i, token in enumerate(completion)]


def plain_turn(
    request_id: str, prompt: Sequence[int], completion: Sequence[int], **more: Any
) -> dict[str, Any]:
    """A turn without rows."""
    return {
        "request_id": request_id,
        "prompt_token_ids": list(prompt),
        "completion_token_ids": list(completion),
        "logprobs": [-0.5] * len(completion),
        **more,
    }


def written_turn(
    root: PayloadRoot,
    request_id: str,
    prompt: Sequence[int],
    completion: Sequence[int],
    *,
    policy_version: int = 0,
    start: int = 0,
    model: ModelShape = MODEL,
    empty_masks: Collection[int] = (),
    **more: Any,
) -> dict[str, Any]:
    """A turn by handle: routing of [start, N - 1), masks of [P, N), written by the library."""
    tokens = len(prompt) + len(completion)
    kept = kept_sets(completion, empty_masks)
    masks = decode_sampling_mask(kept, vocab_size=model.vocab_size)
    assert masks is not None
    choice = ChoicePayload(
        choice=0,
        routing=RoutingRows(pos=start, rows_NLK=routing_rows(start, tokens - 1)),
        masks=MaskColumn(
            pos=len(prompt),
            masks=masks,
            sampled_token_ids_N=np.array(completion, np.int32),
        ),
    )
    report = write_payload(
        root,
        policy_version=policy_version,
        request_id=RequestId(request_id),
        model=model,
        choices=[choice],
    )
    segments = [
        {**{name: getattr(segment, name) for name in segment.__struct_fields__}}
        for segment in report.segments[0]
    ]
    for segment in segments:
        segment["shape"] = list(segment["shape"])
    return plain_turn(request_id, prompt, completion, payload_segments=segments, **more)


def inline_turn(
    request_id: str,
    prompt: Sequence[int],
    completion: Sequence[int],
    *,
    empty_masks: Collection[int] = (),
    **more: Any,
) -> dict[str, Any]:
    """A turn inline: all layers' rows, zeros in the dense one, as a stock engine sends them."""
    rows = np.zeros((len(prompt) + len(completion) - 1, 3, 2), np.uint8)
    rows[:, 1:] = routing_rows(0, len(rows))
    buffer = io.BytesIO()
    np.save(buffer, rows)
    return plain_turn(
        request_id,
        prompt,
        completion,
        routed_experts=base64.b64encode(buffer.getvalue()).decode(),
        sampling_mask=kept_sets(completion, empty_masks),
        **more,
    )


def files_of(turn: dict[str, Any]) -> set[str]:
    """The files that a turn names."""
    return {segment["file"] for segment in turn["payload_segments"]}


def assert_problem(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The one error form; returns its body."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == MEDIA_TYPE
    body: dict[str, Any] = answer.json()
    assert body["code"] == code, body
    return body
