"""Attempts until one succeeds; a first one that does costs nothing more than itself."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from services.inference_proxy.upstream import UpstreamError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryLimits:
    """How often, and how long between."""

    attempts_max: int
    wait_s_max: float


def is_retryable(error: BaseException) -> bool:
    """Whether another attempt may succeed."""
    return isinstance(error, UpstreamError) and error.is_retryable


async def retried(attempt: Callable[[int], Awaitable[T]], limits: RetryLimits) -> T:
    """What the first successful attempt returns; attempts are numbered from 1 on.

    Raises what the last one raised.
    """
    try:
        return await attempt(1)
    except UpstreamError as exc:
        first = exc
    async for state in AsyncRetrying(
        stop=stop_after_attempt(limits.attempts_max),
        wait=wait_random_exponential(multiplier=0.05, max=limits.wait_s_max),
        retry=retry_if_exception(is_retryable),
        reraise=True,
    ):
        with state:
            if state.retry_state.attempt_number == 1:
                raise first  # was made above: now only how to go on is decided
            return await attempt(state.retry_state.attempt_number)
    raise AssertionError("the last attempt returns or raises")
