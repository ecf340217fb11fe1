"""A cache too small for its requests: what is preempted and run again has all its rows."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from scripts.vllm_env.servers import VllmServer, running, start, why_not
from tests.vllm.comparing import Comparer, ask_all, body_of
from tests.vllm.report import Report

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
# 1 KiB per token here: 40 blocks of 32 tokens, for eight requests of up to 210 tokens.
CACHE_BYTES = 40 * 32 * 1024


@pytest.fixture(scope="module")
def small(payload_root: Path, logs: Path) -> Iterator[VllmServer]:
    reason = why_not("0.32")
    if reason is not None:
        pytest.skip(reason)
    flags = ("--kv-cache-memory-bytes", str(CACHE_BYTES))
    server = start("0.32", logs / "small.log", *flags, root=payload_root)
    with running(server) as (ready,):
        yield ready


async def test_preempted_requests_have_all_their_rows(
    small: VllmServer, comparer: Comparer, report: Report
) -> None:
    row = report.row("0.32 preempted requests")

    def body(number: int, **params: Any) -> dict[str, Any]:
        random = np.random.default_rng(900 + number)
        prompt = [int(token) for token in random.integers(0, 1024, 130 + 3 * number)]
        extra = {"payload_dir": f"{comparer.root}/v8", "payload_debug": True}
        return body_of(
            prompt, f"preempted-{number}", seed=number, max_tokens=60, extra_args=extra, **params
        )

    async with httpx.AsyncClient(base_url=small.url, timeout=250) as http:
        answers = await ask_all(http, [body(number, stream=number % 4 == 0) for number in range(8)])
    assert small.metric("vllm:num_preemptions_total") > 0
    for answer in answers:
        comparer.check(answer, row)
