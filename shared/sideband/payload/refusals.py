"""Why the writer refuses rows; a part of the tree in ``errors``.

PayloadRefused
├── WrongRowShape, IdOutOfRange
├── MalformedMask, VocabularyIdOutOfRange, UnsortedMask, SampledTokenNotKept
├── MalformedScores
└── DuplicateChoice
"""

from sideband.payload.errors import PayloadError


class PayloadRefused(PayloadError):
    """What shall be written breaks a rule. Nothing was written."""


class WrongRowShape(PayloadRefused):
    """Rows of another shape or dtype than the model's."""

    def __init__(self, *, found: object, expected: object) -> None:
        self.found, self.expected = found, expected
        super().__init__(f"routing rows are {found}, must be {expected}")


class IdOutOfRange(PayloadRefused):
    """An expert id outside the model's id space."""

    def __init__(self, *, pos: int, expert_id: int, id_space: int) -> None:
        self.pos, self.expert_id, self.id_space = pos, expert_id, id_space
        super().__init__(f"expert id {expert_id} at position {pos} is not below {id_space}")


class MalformedMask(PayloadRefused):
    """Starts, ids and sampled tokens that do not fit each other."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"malformed mask: {reason}")


class MalformedScores(PayloadRefused):
    """Logprobs of kept ids that are not one for each id, or that no sampling has."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"malformed logprobs of kept ids: {reason}")


class VocabularyIdOutOfRange(PayloadRefused):
    """A kept id outside the vocabulary."""

    def __init__(self, *, pos: int, token_id: int, vocab_size: int) -> None:
        self.pos, self.token_id, self.vocab_size = pos, token_id, vocab_size
        super().__init__(f"kept id {token_id} at position {pos} is not in [0, {vocab_size})")


class UnsortedMask(PayloadRefused):
    """Kept ids of a row that do not ascend, or repeat."""

    def __init__(self, *, pos: int) -> None:
        self.pos = pos
        super().__init__(f"kept ids at position {pos} do not ascend")


class SampledTokenNotKept(PayloadRefused):
    """A sampled token outside its own kept set: the set is not the one that was sampled from."""

    def __init__(self, *, pos: int, token_id: int) -> None:
        self.pos, self.token_id = pos, token_id
        super().__init__(f"token {token_id} sampled at position {pos} is not in its kept set")


class DuplicateChoice(PayloadRefused):
    """The same choice twice in one request."""

    def __init__(self, choice: int) -> None:
        self.choice = choice
        super().__init__(f"choice {choice} appears twice")
