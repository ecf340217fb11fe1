"""What the two sides say to each other, one JSON file each. Clocks are seconds since the epoch."""

import msgspec


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """Who takes part."""

    host: str
    boot_id: str  # equal on two processes of one running machine
    fsync_s: list[float]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The leader asks for one probe, about ``file``: echo, fresh, watch, read, hold, lock,
    end.
    """

    op: str
    sent_s: float
    file: str = ""
    size_bytes: int = 0
    checksum: int = 0
    duration_s: float = 0.0


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What the follower saw of it."""

    received_s: float
    replied_s: float
    reads: int = 0
    torn: int = 0  # contents that no writer ever wrote
    missing: int = 0  # the name was not there although a file was renamed over it
    stale: int = 0  # the server forgot the handle; a retry helps
    seconds: float = 0.0
    error: str = ""


class Echo(msgspec.Struct, frozen=True, kw_only=True):
    """One round trip: sent, returned by the leader's clock; received, replied by the other's."""

    sent_s: float
    received_s: float
    replied_s: float
    returned_s: float

    @property
    def travel_s(self) -> float:
        """Both ways, without the time that the follower took."""
        return (self.returned_s - self.sent_s) - (self.replied_s - self.received_s)

    @property
    def skew_s(self) -> float:
        """How far the follower's clock is ahead, if both ways took as long."""
        return ((self.received_s - self.sent_s) + (self.replied_s - self.returned_s)) / 2


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All numbers of one visit."""

    lead: Side
    follow: Side
    filesystem: str
    fresh: list[Reply]  # seconds until an announced file was read whole
    echoes: list[Echo]
    watch: Reply
    read: Reply
    read_bytes: int
    hold: Reply
    lock: Reply

    @property
    def is_one_host(self) -> bool:
        """Both sides share a page cache, so nothing was learned about another host."""
        return self.lead.boot_id == self.follow.boot_id
