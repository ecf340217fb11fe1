"""The library's error tree. Facts are attributes; the constructor builds the message.

SidebandError
├── InvalidInput            a value from outside breaks a rule (field, value, rule)
│   ├── InvalidId           not 1..128 bytes of [A-Za-z0-9._:-]
│   ├── MalformedSegment    a segment that cannot exist
│   ├── UnknownArchitecture a model config that no rule knows (sideband.routing)
│   └── …                   each module draws its own leaves in its docstring
├── PayloadError            a payload file or root is not what it must be (sideband.payload.errors)
└── FeedError               the feed or a peer breaks the protocol (sideband.feed.errors)
"""


class SidebandError(Exception):
    """Root of all named errors. Anything else that escapes is a bug in Sideband."""


class InvalidInput(SidebandError):
    """A value from outside breaks a rule: ``field`` says which, ``rule`` what it must be."""

    def __init__(self, field: str, value: object, rule: str) -> None:
        self.field, self.value, self.rule = field, value, rule
        shown = repr(value)
        if len(shown) > 120:  # a hostile value must not fill the log
            shown = shown[:117] + "..."
        super().__init__(f"{field} is {shown}: {rule}")


class InvalidId(InvalidInput):
    """An id on the wire that is not 1 to 128 bytes of ``[A-Za-z0-9._:-]``."""

    def __init__(self, field: str, value: object) -> None:
        super().__init__(field, value, "must be 1 to 128 characters of [A-Za-z0-9._:-]")


class PayloadError(SidebandError):
    """A payload file, or the root it lies in, is not what it must be."""


class FeedError(SidebandError):
    """The feed, or a peer of it, breaks the protocol or does not answer in time."""
