"""One request on its way through the server: its rows taken off, written, and told.

The server's own generators stay in charge of everything else; the two here wrap what goes into
them (``results``) and what comes out (``events``).
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Final

import msgspec

from sideband.engines.vllm.state import PluginState, Wish
from sideband.engines.vllm.takes import ResultLike, Takings, keep_routed_layers, rows_bytes
from sideband.engines.vllm.writing import Request, Write, handle_members
from sideband.errors import SidebandError

log: Final = logging.getLogger("vllm.sideband")
OFFLOAD_BYTES_MIN: Final = 1 << 20  # below, a thread costs more than the copy
_EVENT: Final = "data: "


class Turn:
    """State of one request. Not shared between tasks, but ``abandon`` may come while it waits."""

    def __init__(
        self, state: PluginState, wish: Wish, *, choices: int, prompt_start: int, is_stream: bool
    ) -> None:
        self._state, self._wish = state, wish
        self._prompt_start, self._is_stream = prompt_start, is_stream
        self._takings = Takings(choices=choices, is_stream=is_stream)
        self._write: Write | None = None
        self._members: dict[str, Any] = {}  # of the answer's top level
        self._running = set(range(choices))
        self._unsaid: set[int] = set()  # choices that end with the last result

    async def results(
        self, inner: AsyncGenerator[ResultLike, None]
    ) -> AsyncGenerator[ResultLike, None]:
        """The engine's results without the rows that nobody shall encode.

        Streamed, the last one waits for the file; a file that cannot be written raises here, and
        the server tells its client in its own way.
        """
        async with aclosing(inner) as results:
            async for result in results:
                if self._wish.target is not None:
                    self._takings.take(result, leaves_inline=self._wish.is_debug)
                    if self._is_stream and self._takings.is_complete:
                        await self._written()
                elif not self._wish.is_debug:
                    await self._cut(result)
                ended = {o.index for o in result.outputs if o.finish_reason}
                if self._running and not self._running - ended:
                    self._unsaid = ended
                self._running -= ended
                yield result

    async def members(self) -> dict[str, Any]:
        """What a whole answer carries besides, once its file is durable.

        Raises SidebandError; no file is left then, nor when this is cancelled.
        """
        if self._wish.target is not None:
            await self._written()
        return self._state.signed(self._members)

    async def events(
        self, inner: AsyncGenerator[str, None], results: AsyncGenerator[ResultLike, None]
    ) -> AsyncIterator[str]:
        """The server's events; the one that ends the last choice carries the segments.

        The file stays only if that event was taken by the server's own sender.
        """
        is_told = False
        try:
            async with aclosing(results), aclosing(inner):
                async for event in inner:
                    changed = self._changed(event)
                    yield changed or event
                    is_told = is_told or (changed is not None and self._is_by_handle)
        finally:
            if self._write is not None and not is_told:
                self._abandon(self._write)

    @property
    def _is_by_handle(self) -> bool:
        return self._wish.target is not None

    async def _cut(self, result: ResultLike) -> None:
        model, size_bytes = self._state.model, rows_bytes(result)
        if model is None or not size_bytes:
            return
        layer_ids, num_layers = model.layer_ids, model.num_layers
        if size_bytes < OFFLOAD_BYTES_MIN:
            has_cut = keep_routed_layers(result, layer_ids, num_layers)
        else:
            loop = asyncio.get_running_loop()
            has_cut = await loop.run_in_executor(
                self._state.pool, keep_routed_layers, result, layer_ids, num_layers
            )
        if has_cut:
            self._members = {"routed_layer_ids": list(layer_ids)}

    async def _written(self) -> None:
        """Write the file in a thread and wait. Raises what ``Write.run`` does."""
        target, model = self._wish.target, self._state.model
        assert target is not None, "only requests by handle write"
        assert model is not None, "a server that does not know its model admits none of them"
        self._write = write = Write(
            Request(
                target=target,
                model=model,
                encodings=self._state.settings.encodings,
                prompt_tokens=self._takings.prompt_tokens,
                prompt_start=self._prompt_start,
                choices=self._takings.choices,
            )
        )
        running = asyncio.get_running_loop().run_in_executor(self._state.pool, write.run)
        try:
            report = await asyncio.shield(running)
        except asyncio.CancelledError:
            running.add_done_callback(_say_lost)
            self._abandon(write)
            raise
        if report.rows_invalid:
            log.warning("sideband: %s: %d invalid rows left out", report.file, report.rows_invalid)
        self._members = handle_members(report, model)

    def _abandon(self, write: Write) -> None:
        """Never waits: the client has left, and the task may be on its way out."""
        self._state.pool.submit(write.abandon).add_done_callback(_say_lost)

    def _changed(self, event: str) -> str | None:
        """The event with our members, or None when it needs none."""
        is_late = bool(self._unsaid)  # only events of the last result come now
        if not (is_late or self._members) or not event.startswith(_EVENT + "{"):
            return None
        body = msgspec.json.decode(event[len(_EVENT) :])
        choices = body.get("choices")
        if not choices:
            return None
        self._unsaid -= {c["index"] for c in choices if c.get("finish_reason") is not None}
        is_last = is_late and not self._unsaid
        has_rows = any(choice.get("routed_experts") is not None for choice in choices)
        members = self._members if is_last or (has_rows and not self._is_by_handle) else {}
        members = self._state.signed(members) if is_last else members
        if not members:
            return None
        return f"{_EVENT}{msgspec.json.encode({**body, **members}).decode()}\n\n"


def _say_lost(done: Any) -> None:
    """A failure that nobody waits for any more."""
    if not done.cancelled() and isinstance(done.exception(), SidebandError):
        log.warning("sideband: an abandoned request: %s", done.exception())
