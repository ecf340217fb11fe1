"""The plugin's own handler over the fake server, with a payload root to write to."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from sideband.engines.inline import decode_npy_base64
from sideband.engines.vllm.hooks import serving
from sideband.engines.vllm.settings import PluginSettings
from sideband.engines.vllm.state import PluginState
from sideband.engines.vllm.versions import SERVING_CLASS, judge_version
from sideband.ids import RunId
from sideband.payload.encodings import DEFAULT_ENCODINGS, Encodings
from sideband.payload.reader import PayloadReader
from sideband.payload.root import PayloadRoot
from sideband.routing.rows import scatter_layers
from sideband.segments import PayloadSegment
from tests.unit.engines.vllm.fakes import (
    MODEL,
    GenerateRequest,
    SamplingParams,
    Script,
    serving_module,
    vllm_config,
)

RUN = RunId("run-1")


@dataclass
class Server:
    """A server with the plugin; ``script`` is its engine."""

    handler: Any
    script: Script
    root: Path

    @property
    def state(self) -> PluginState:
        found: PluginState = self.handler.sideband
        return found

    def request(self, prompt: list[int], **asked: Any) -> GenerateRequest:
        """A request by handle; ``extra`` replaces its extra arguments, ``n`` and others too."""
        extra = asked.pop("extra", {"payload_dir": f"{self.root}/v3", "payload_run_id": RUN})
        extra = extra | asked.pop("more", {})
        return GenerateRequest(
            token_ids=prompt,
            request_id=asked.pop("request_id", "r1"),
            stream=asked.pop("stream", False),
            sampling_params=SamplingParams(extra_args=extra, **asked),
        )

    async def answer(self, request: GenerateRequest) -> dict[str, Any]:
        """What the server's route would dump."""
        answer = await self.handler.serve_tokens(request, None)
        body: dict[str, Any] = answer.model_dump()
        return body

    async def events(self, request: GenerateRequest) -> list[dict[str, Any]]:
        """Every event of a stream but the last, which says that it is."""
        stream = await self.handler.serve_tokens(request, None)
        found = [event async for event in stream]
        assert found.pop() == "data: [DONE]\n\n"
        assert all(event.startswith("data: ") and event.endswith("\n\n") for event in found)
        return [msgspec.json.decode(event[6:]) for event in found]

    def files(self) -> list[str]:
        """Everything below the root but its marker, staging leftovers too."""
        return sorted(
            str(path.relative_to(self.root))
            for path in self.root.rglob("*")
            if path.is_file() and path.parent != self.root
        )

    def settled(self) -> None:
        """Returns when every write and delete has ended. Blocks."""
        self.state.pool.shutdown(wait=True)

    def rows(self, segments: list[dict[str, Any]]) -> NDArray[Any]:
        """All layers' rows of a choice, out of its file; one run is expected."""
        segment = _segment(segments, "routed_experts")
        model = self.state.model
        assert model is not None
        out = np.empty((segment.rows, *segment.shape), model.row_dtype)
        with PayloadReader(PayloadRoot.open(self.root), model=model) as reader:
            reader.read_routing(segment, out)
        return scatter_layers(out, model.layer_ids, model.num_layers)

    def masks(self, segments: list[dict[str, Any]], *, choice: int = 0) -> list[list[int]]:
        """Kept sets of a choice, out of its file."""
        tokens = np.array(self.script.tokens[choice], np.int32)
        with PayloadReader(PayloadRoot.open(self.root), model=MODEL) as reader:
            masks = reader.read_masks(_segment(segments, "sampling_mask"), tokens)
        return [masks[row].tolist() for row in range(len(masks))]


def _segment(segments: list[dict[str, Any]], field: str) -> PayloadSegment:
    (found,) = [segment for segment in segments if segment["field"] == field]
    return msgspec.convert(found, PayloadSegment)


def server(
    tmp_path: Path,
    script: Script,
    *,
    version: str = "0.32.0",
    threads: int = 4,
    root: bool = True,
    encodings: Encodings = DEFAULT_ENCODINGS,
    **config: Any,
) -> Server:
    """A started server over ``script``."""
    path = tmp_path / "payloads"
    PayloadRoot.create(path, RUN, fresh=True)
    settings = PluginSettings(
        payload_root=path if root else None, write_threads=threads, encodings=encodings
    )
    module = serving_module()
    serving.install(module, settings, judge_version(version, accepted=None))
    engine = SimpleNamespace(generate=script.generate, vllm_config=vllm_config(**config))
    return Server(handler=getattr(module, SERVING_CLASS)(engine), script=script, root=path)


def inline_rows(choice: dict[str, Any]) -> NDArray[np.uint8] | NDArray[np.uint16]:
    """What an inline choice carries."""
    return decode_npy_base64(choice["routed_experts"], bytes_max=1 << 20)


async def until(holds: Callable[[], object]) -> None:
    """Wait until ``holds()``."""
    async with asyncio.timeout(5):
        while not holds():  # noqa: ASYNC110 - state of any kind is polled
            await asyncio.sleep(0.005)
