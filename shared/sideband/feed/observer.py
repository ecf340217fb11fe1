"""What a feed tells whoever keeps its logs and metrics."""

from collections.abc import Sequence

from sideband.feed.facts import RankState


class FeedObserver:
    """Does nothing; a service overrides what it wants. Called on the event loop: be quick."""

    def step_accepted(self, step: int, *, micro_batch_count: int, body_bytes: int) -> None:
        """A step is held."""

    def step_committed(self, step: int) -> None:
        """Every rank has committed the step; it is forgotten."""

    def intake_blocked(self, ranks: Sequence[int]) -> None:
        """A step was refused: the feed is full, and these ranks are gone that would empty it."""

    def step_failed(self, step: int, *, rank: int, reason: str) -> None:
        """A rank gave the step up, so all do."""

    def rank_joined(self, rank: RankState) -> None:
        """A rank said hello."""

    def rank_left(self, rank: RankState, *, is_lost: bool) -> None:
        """A rank said goodbye, or fell silent."""

    def rank_refused(self, code: str, reason: str) -> None:
        """Somebody was not let in, or spoke nonsense."""

    def peers_denied(self, reason: str, count: int) -> None:
        """``count`` connections were not let in: ``key``, ``protocol`` or ``handshake``."""

    def micro_batch_sent(self, rank: RankState, *, step: int, sent_bytes: int) -> None:
        """A chunk is on the way."""
