"""What counts since the trainer went back to an earlier checkpoint: decisions without sockets.

Errors: RankRefused, LineageConflict.
"""

from sideband.feed.errors import LineageConflict, RankRefused
from sideband.feed.facts import GoneBack


class Lineage:
    """The last time that the trainer went back, and the steps that were sent since."""

    def __init__(self) -> None:
        self.gone_back: GoneBack | None = None
        self._sent_step = 0  # the last of which any rank got a part, or may have got one

    def begin(self, to: GoneBack, *, is_new_feed: bool) -> bool:
        """The trainer went back. False when that is known. Raises LineageConflict.

        A feed that was started anew since does not know what was sent: any step that was built.
        """
        known = self.gone_back
        if known is not None and to.lineage <= known.lineage:
            if (to.lineage, to.step) != (known.lineage, known.step):
                raise LineageConflict(to.lineage, to.step, known=(known.lineage, known.step))
            return False
        self.gone_back = to
        self._sent_step = to.last_step if is_new_feed else to.step
        return True

    def sent(self, step: int) -> None:
        """A rank gets a part of ``step``."""
        self._sent_step = max(self._sent_step, step)

    def check(self, step: int | None) -> None:
        """A commit must be of a step that was sent since the trainer went back, or of before."""
        if step is None or self.gone_back is None or step <= self._sent_step:
            return
        reason = f"committed step {step}, but the trainer went back to step {self.gone_back.step}"
        raise RankRefused("went_back", reason)
