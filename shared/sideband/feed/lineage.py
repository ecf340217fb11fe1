"""What counts since the trainer went back to an earlier checkpoint: decisions without sockets.

Errors: RankRefused, LineageConflict.
"""

from sideband.feed.ancestry import Line, last_held, line_after
from sideband.feed.errors import LineageConflict, RankRefused
from sideband.feed.facts import GoneBack, Hello


class Lineage:
    """How often the trainer went back, the last time, and the steps that were sent since."""

    def __init__(self) -> None:
        self.gone_back: GoneBack | None = None
        self._line: Line = ()
        self._sent_step = 0  # the last of which any rank got a part, or may have got one

    @property
    def number(self) -> int:
        """How often the trainer went back, as told."""
        return 0 if self.gone_back is None else self.gone_back.lineage

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
        self._line = line_after(to.earlier, lineage=to.lineage, step=to.step)
        self._sent_step = to.last_step if is_new_feed else to.step
        return True

    def sent(self, step: int) -> None:
        """A rank gets a part of ``step``."""
        self._sent_step = max(self._sent_step, step)

    def refusal(
        self, lineage: int | None, committed_step: int | None, *, is_untold: bool = False
    ) -> RankRefused | None:
        """Why somebody of ``lineage`` (None: it got nothing yet) who committed this is refused.

        It must be of this lineage, unless this feed ``is_untold`` yet; its commit must be of a
        step that was sent since the trainer went back, or of before.
        """
        back = self.gone_back
        if lineage not in {None, self.number} and not is_untold:
            since = f", the trainer went back to step {back.step}" if back is not None else ""
            reason = f"is of lineage {lineage}, the run is at lineage {self.number}{since}"
            return RankRefused("other_lineage", reason)
        if committed_step is not None and back is not None and committed_step > self._sent_step:
            reason = (
                f"committed step {committed_step}, but the trainer went back to step {back.step}"
            )
            return RankRefused("went_back", reason)
        return None

    def check_restored(self, hello: Hello, *, is_untold: bool = False) -> None:
        """What a trainer restored must be of the run, where it says in which lineage it was
        trained; else it is taken by its number. Raises RankRefused.
        """
        lineage, step = hello.committed_lineage, hello.committed_step
        if lineage is None or step is None or is_untold:
            return
        held = last_held(self._line, lineage)
        if lineage > self.number:
            reason = f"holds step {step} of lineage {lineage}, the run is at lineage {self.number}"
            raise RankRefused("other_lineage", reason)
        if self.gone_back is not None and held is not None and step > held:
            reason = (
                f"holds step {step} of lineage {lineage}, of which the run holds steps up to "
                f"{held}: the trainer went back to step {self.gone_back.step}"
            )
            raise RankRefused("went_back", reason)

    def check(
        self, lineage: int | None, committed_step: int | None, *, is_untold: bool = False
    ) -> None:
        """As ``refusal``, but raises it."""
        refusal = self.refusal(lineage, committed_step, is_untold=is_untold)
        if refusal is not None:
            raise refusal
