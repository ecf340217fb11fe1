"""The services beside the orchestrator, as far as its tests need them: a feed and a proxy."""

import json
from dataclasses import dataclass, field
from typing import Any

import httpx

from sideband.feed.codec import Step, decode_step


def refusal(status: int, code: str, **headers: str) -> httpx.Response:
    """What a service answers when it will not."""
    return httpx.Response(status, json={"code": code, "detail": code}, headers=headers)


@dataclass
class StubFeed:
    """Takes steps as the feed does; a test commits them, fails it or makes it forget."""

    run_id: str = "run-1"
    steps: dict[int, Step] = field(default_factory=dict)
    taken: list[int] = field(default_factory=list)
    held: set[int] = field(default_factory=set)
    committed_step: int | None = None
    refusals: list[httpx.Response] = field(default_factory=list)
    failed: dict[str, Any] | None = None
    ranks: list[tuple[int, int]] = field(default_factory=list)  # global rank, committed step
    is_down: bool = False
    has_ended: bool = False
    instance: str = "feed-1"
    lineage: int = 0
    told: list[dict[str, Any]] = field(default_factory=list)  # that the trainer went back
    restarts_before_put: bool = False
    restarts_before_end: bool = False

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.is_down:
            raise httpx.ConnectError("the feed is down", request=request)
        path = request.url.path
        if request.method == "PUT" and path.startswith("/v1/steps/"):
            if self.has_ended:
                return refusal(409, "feed_ended")
            if self.refusals:
                return self.refusals.pop(0)
            if self.restarts_before_put:
                self.restarts_before_put = False
                self.forget()
            if request.headers.get("sideband-feed-instance", self.instance) != self.instance:
                return refusal(412, "feed_restarted")
            step = decode_step(request.content)
            assert step.step == int(path.rsplit("/", 1)[1])
            if self.held and step.step not in {*self.held, max(self.held) + 1}:
                return refusal(409, "step_out_of_order")
            self.steps[step.step] = step
            self.taken.append(step.step)
            self.held.add(step.step)
            return httpx.Response(201, json={})
        if path == "/v1/steps":
            steps = [{"step": step} for step in self.held]
            body = {"feed_instance": self.instance, "steps": steps, "lineage": self.lineage}
            return httpx.Response(200, json=body)
        if path == "/v1/lineage":
            self.go_back(json.loads(request.content))
            return httpx.Response(200, json={})
        if path == "/v1/acknowledgements":
            body = {
                "run_id": self.run_id,
                "lineage": self.lineage,
                "committed_step": self.committed_step,
                "failed": self.failed,
                "ranks": [
                    {"global_rank": rank, "committed_step": step} for rank, step in self.ranks
                ],
            }
            return httpx.Response(200, json=body)
        if path == "/v1/end":
            if self.restarts_before_end:
                self.restarts_before_end = False
                self.forget()
            if request.headers.get("sideband-feed-instance", self.instance) != self.instance:
                return refusal(412, "feed_restarted")
            self.has_ended = request.method == "POST"
            return httpx.Response(200, json={})
        return httpx.Response(404, json={"code": "not_found", "detail": path})

    def commit(self, step: int) -> None:
        """Every rank has committed ``step``."""
        self.committed_step = step
        self.held = {held for held in self.held if held > step}

    def forget(self) -> None:
        """The feed is started anew and knows nothing."""
        self.held, self.committed_step, self.lineage = set(), None, 0
        self.has_ended = False
        self.instance = f"feed-{int(self.instance.removeprefix('feed-')) + 1}"

    def go_back(self, told: dict[str, Any]) -> None:
        """The trainer went back: later steps and commits are void."""
        self.told.append(told)
        committed, step = self.committed_step, told["step"]
        self.forget()
        self.lineage = told["lineage"]
        self.committed_step = None if committed is None else min(committed, step)


@dataclass
class StubProxy:
    """Says which version is applied, and takes discards."""

    applied: int = 0
    discarded: list[str] = field(default_factory=list)
    is_down: bool = False

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.is_down:
            raise httpx.ConnectError("the proxy is down", request=request)
        if request.url.path == "/v1/policy-version":
            return httpx.Response(200, json={"applied": self.applied, "engines": {}})
        self.discarded.append(request.url.path.rsplit("/", 1)[1])
        return httpx.Response(200, json={})
