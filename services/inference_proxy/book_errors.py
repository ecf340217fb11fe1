"""What the book of engines refuses; ``errors`` says how a client is told."""


class UnknownEngine(Exception):
    """No engine of that name is configured."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"no engine is called {name!r}")


class VersionBackwards(Exception):
    """A report would take an engine back to an older version without saying so."""

    def __init__(self, name: str, *, reported: int, known: int) -> None:
        self.name, self.reported, self.known = name, reported, known
        super().__init__(f"engine {name} has v{known}: v{reported} is older (use force)")
