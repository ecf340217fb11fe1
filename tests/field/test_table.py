"""docs/known-faults-of-the-field.md names tests that exist, for every report once."""

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
REPORTS: Final = [
    *["1", "2", "3", "5", "7", "8", "9", "10", "11", "12", "13"],
    *["15", "16", "17", "18", "20", "21", "22", "24", "25", "26", "28"],
    *["29", "30", "31", "32", "33", "34", "35", "37", "38", "39", "40", "42", "44", "45", "46"],
    *["47", "48", "49", "50", "53", "54", "55", "55b", "56", "59", "61", "62", "63", "64"],
]


def rows() -> list[list[str]]:
    """The table's cells, headings left out."""
    page = (ROOT / "docs" / "known-faults-of-the-field.md").read_text()
    lines = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| P")]
    return [[cell.strip() for cell in line] for line in lines]


def test_every_report_has_one_row_with_its_reason_and_its_tests() -> None:
    assert [row[0] for row in rows()] == [f"P{number}" for number in REPORTS]
    assert all(len(row) == 4 and all(row) for row in rows())


def test_every_test_that_the_table_names_exists() -> None:
    sources = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    known = {name for text in sources for name in re.findall(r"def (test_\w+)\(", text)}
    named = {name for row in rows() for name in re.findall(r"`(test_\w+)`", row[3])}
    assert all(re.search(r"`test_\w+`", row[3]) for row in rows())
    assert named - known == set()
