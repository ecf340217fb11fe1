"""Answers of services that must be good ones."""

import httpx

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
