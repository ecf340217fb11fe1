"""What is reported of engines that name their weights nowhere is of one process, and no other."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from fastapi import Request, Response

from tests.services.inference_proxy.harness import request_body, running, until
from tests.services.inference_proxy.stub import StubEngine
from tests.services.inference_proxy.test_processes import (
    KINDS,
    NOT_ASKED,
    PROMPT,
    start_anew,
    with_plugin,
)
from tests.services.inference_proxy.test_sampled import report, view_of


@KINDS
async def test_what_is_reported_is_of_the_process_that_runs_then(
    tmp_path: Path, kind: Callable[[], StubEngine]
) -> None:
    engine = kind()
    async with running({"e0": engine}, root=tmp_path / "root", **NOT_ASKED) as proxy:
        await report(proxy, 3)
        start_anew(engine)  # unseen, and brought to v4 before anybody asks
        await report(proxy, 4)
        assert (await proxy.generate(request_body(PROMPT))).status_code == 200
        start_anew(engine)
        assert (await proxy.generate(request_body(PROMPT))).status_code == 503


@KINDS
async def test_what_the_proxy_itself_updates_is_of_the_process_that_runs_then(
    tmp_path: Path, kind: Callable[[], StubEngine]
) -> None:
    engine = kind()
    update = {"policy_version": 4, "weights_path": "/weights/v4"}
    async with running({"e0": engine}, root=tmp_path / "root", **NOT_ASKED) as proxy:
        await report(proxy, 3)
        start_anew(engine)
        assert (await proxy.http.post("/v1/admin/weights", json=update)).status_code == 200
        assert (await proxy.generate(request_body(PROMPT))).status_code == 200
        start_anew(engine)
        assert (await proxy.generate(request_body(PROMPT))).status_code == 503


class Dying(StubEngine):
    """Starts anew as soon as it has the weights, and answers on."""

    async def administered(self, path: str, request: Request) -> Response:
        answer = await super().administered(path, request)
        if path == "update_weight_version":
            start_anew(self)
        return answer


@KINDS
async def test_an_engine_that_dies_while_others_get_their_weights_does_not_have_them(
    tmp_path: Path, kind: Callable[[], StubEngine]
) -> None:
    other = kind()
    died = Dying(
        identity=other.identity,
        process=other.process,
        started_s=other.started_s,
        spills=other.spills,
    )
    update = {"policy_version": 4, "weights_path": "/weights/v4"}
    async with running({"e0": died, "e1": other}, root=tmp_path / "root", **NOT_ASKED) as proxy:
        told = (await proxy.http.post("/v1/admin/weights", json=update)).json()
        assert (told["updated"], told["applied"]) == (["e1"], 4)
        assert told["failed"] == {"e0": "it was started anew meanwhile"}
        why = "held: weight update to v4 failed: it was started anew meanwhile"
        view = await view_of(proxy, "e0")
        assert (view["why_out"], view["policy_version"]) == (why, 0)
        assert died.admin_calls[-1] == ("/pause?mode=abort", None)


@KINDS
async def test_a_report_before_the_first_probe_is_of_the_process_that_runs_then(
    kind: Callable[[], StubEngine],
) -> None:
    engine = kind()
    engine.hangs_until = asyncio.Event()
    async with running({"e0": engine}, waits=False, **NOT_ASKED) as proxy:
        await report(proxy, 3)
        start_anew(engine)
        engine.hangs_until.set()
        await until(lambda: proxy.parts.book.get("e0").health.state == "healthy")
        assert (await view_of(proxy, "e0"))["policy_version"] == 0


async def test_a_report_while_an_engine_does_not_answer_is_of_the_process_known_before() -> None:
    engine = with_plugin()
    async with running({"e0": engine}, **NOT_ASKED) as proxy:
        engine.identity_status = 500
        await report(proxy, 3)
        assert (await proxy.generate(request_body(PROMPT))).status_code == 200
        start_anew(engine)
        await report(proxy, 4)
        engine.identity_status = 200
        assert (await proxy.generate(request_body(PROMPT))).status_code == 503
