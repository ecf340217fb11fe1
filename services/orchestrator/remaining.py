"""What is left of steps that are to come again: samples in the ledger, files on the disk.

Raises LedgerError throughout.
"""

import asyncio
from dataclasses import replace

from services.orchestrator import going_back
from services.orchestrator.book import Book
from services.orchestrator.files import Files
from services.orchestrator.going_back import Remains
from services.orchestrator.ledger import Ledger
from services.orchestrator.limits import FILES_PER_STAT
from sideband.batch.types import Sample
from sideband.ids import RolloutId
from sideband.segments import PayloadSegment


async def remains_after(book: Book, ledger: Ledger, files: Files | None, step: int) -> Remains:
    """What is left of the steps after ``step``; the samples of one step at a time are in memory."""
    steps = going_back.steps_after(book, step)
    names_files: dict[RolloutId, frozenset[str]] = {}
    for names in steps.values():
        found = await ledger.samples(names)
        names_files |= {name: files_of(samples) for name, samples in found.items()}
    named = sorted(frozenset[str]().union(*names_files.values()))
    # A resume has given up what it found gone: no step holds that any more, should it come back.
    missing = frozenset(filter(book.retention.is_given_up, named))
    if files is not None:
        missing |= frozenset(await missing_files(files, named))
    remains = Remains(steps=steps, files=names_files, files_missing=missing)
    gap = going_back.first_gap(book, step, remains)
    behind = [name for number, names in steps.items() if number >= gap for name in names]
    return replace(remains, samples=dict(await ledger.samples(behind)))


def files_of(samples: tuple[Sample, ...]) -> frozenset[str]:
    """Every payload file that a rank reads for these."""
    return frozenset(
        segment.file
        for sample in samples
        for segment in sample.segments
        if isinstance(segment, PayloadSegment)
    )


async def missing_files(files: Files, names: list[str]) -> list[str]:
    """Those of ``names`` that are not on the disk, asked for by many threads."""
    pieces = [names[i : i + FILES_PER_STAT] for i in range(0, len(names), FILES_PER_STAT)]
    found = await asyncio.gather(*(files.call(files.missing, piece) for piece in pieces))
    return [name for piece in found for name in piece]
