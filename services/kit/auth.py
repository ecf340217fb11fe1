"""Bearer tokens, asked for on every route but health, readiness, version and metrics."""

import hmac
from collections.abc import Sequence

from fastapi import Request
from pydantic import SecretStr

from services.kit.problems import Unauthorized


class TokenCheck:
    """A FastAPI dependency. Compares in constant time against each token."""

    def __init__(self, tokens: Sequence[SecretStr]) -> None:
        self._tokens = [token.get_secret_value().encode() for token in tokens]

    async def __call__(self, request: Request) -> None:
        """Raises Unauthorized unless the request carries one of the tokens (or none are set)."""
        if not self.allows(request.headers.get("authorization", "")):
            raise Unauthorized(
                "A bearer token of this service is needed.",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def allows(self, authorization: str) -> bool:
        """Whether the header's value carries one of the tokens, or none are set."""
        if not self._tokens:
            return True
        scheme, _, given = authorization.partition(" ")
        # Every token is compared, so that timing says nothing about which one is near.
        matches = [hmac.compare_digest(given.strip().encode(), token) for token in self._tokens]
        return scheme.lower() == "bearer" and any(matches)
