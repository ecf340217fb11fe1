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
    held: list[bytes] = []  # of one piece
    missing = characters
    for part in text.parts:
        at = 0
        while len(part) - at >= missing:
            held.append(part[at : at + missing])
            yield b"".join(held)
            held, at, missing = [], at + missing, characters
        if at < len(part):
            held.append(part[at:])
            missing -= len(part) - at
    if held:
        yield b"".join(held)
