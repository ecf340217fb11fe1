"""Answers of services that must be good ones."""

import asyncio
from collections.abc import Collection
from typing import Any, Final

import httpx

POLL_S: Final = 0.03
ANSWER_TIMEOUT_S: Final = 120.0  # what answers may die, and come back, on a busy machine
SHOWN_CHARACTERS_MAX = 500


class RunStopped(Exception):
    """The run did not end well: a service refused, or gave up."""


def checked(answer: httpx.Response) -> httpx.Response:
    """The answer itself. Raises RunStopped for an error."""
    if not answer.is_success:
        request = answer.request
        shown = f"{answer.status_code} {answer.text[:SHOWN_CHARACTERS_MAX]}"
        raise RunStopped(f"{request.method} {request.url}: {shown}")
    return answer


async def answered(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    body: dict[str, Any] | None = None,
    *,
    fine: Collection[int] = (),
    **options: Any,
) -> httpx.Response:
    """The answer of a service that may be gone for a while. Raises RunStopped, TimeoutError."""
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        while True:
            try:
                answer = await client.request(method, url, json=body, **options)
            except httpx.TransportError:
                pass
            else:
                if answer.status_code in fine:
                    return answer
                if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                    return checked(answer)
            await asyncio.sleep(POLL_S)
