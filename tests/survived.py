"""What seeded tests inject and survive: noted by each test, told once at the end.

Notes are a report's user properties, so that they come back from workers of xdist too.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

import pytest

PROPERTY = "survived"


def note(node: pytest.Item, title: str, seeds: Iterable[int], counts: Mapping[str, int]) -> None:
    """One test has injected ``counts`` by ``seeds``; told under ``title`` if it passes."""
    node.user_properties.append((PROPERTY, (title, [*seeds], dict(counts))))


def tell(terminalreporter: pytest.TerminalReporter) -> None:
    """A line for each title: the seeds, and how often each kind struck and was survived."""
    seeds: defaultdict[str, set[int]] = defaultdict(set)
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for report in terminalreporter.getreports(""):
        if report.when == "teardown" and report.passed:
            for name, value in report.user_properties:
                if name == PROPERTY:
                    title, some, found = value
                    seeds[title].update(some)
                    counts[title].update(found)
    for title in sorted(seeds):
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(counts[title].items()))
        terminalreporter.write_line(f"{title}, seeds {spans(seeds[title])}: {kinds or 'none'}")


def spans(seeds: Iterable[int]) -> str:
    """Neighbours joined: ``0-2, 7``."""
    found: list[list[int]] = []
    for seed in sorted(seeds):
        if found and seed == found[-1][1] + 1:
            found[-1][1] = seed
        else:
            found.append([seed, seed])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)
