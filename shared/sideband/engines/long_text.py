"""A long text in parts: no call handles all of it, and so none holds the interpreter long. Pure."""

from collections.abc import Iterator


class LongText:
    """ASCII that JSON needs no escape for, as bytes in the parts in which it came.

    No dataclass: encoders would write one as an object.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: tuple[bytes, ...]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def begin(self, characters: int) -> str:
        """Of the text, no more than its first part has."""
        return self.parts[0][:characters].decode("ascii") if self.parts else ""


def slices_of(text: str | LongText, characters: int) -> Iterator[str | bytes]:
    """The text in pieces of ``characters``, a shorter one at its end."""
    if isinstance(text, str):
        for at in range(0, len(text), characters):
            yield text[at : at + characters]
        return
    rest = b""
    for part in text.parts:
        rest, at = rest + part[: max(0, characters - len(rest))], characters - len(rest)
        while len(rest) == characters:
            yield rest
            rest, at = part[at : at + characters], at + characters
    if rest:
        yield rest
