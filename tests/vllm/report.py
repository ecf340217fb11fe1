"""What the tests print at their end: turns compared, bytes inline against by handle."""

from dataclasses import dataclass, field


@dataclass
class Row:
    """One check."""

    check: str
    turns: int = 0
    rows: int = 0
    inline_bytes: int = 0
    handle_bytes: int = 0

    def add(self, *, rows: int, inline_bytes: int, handle_bytes: int) -> None:
        """One turn that was found equal in both forms."""
        self.turns += 1
        self.rows += rows
        self.inline_bytes += inline_bytes
        self.handle_bytes += handle_bytes


@dataclass
class Report:
    """Rows in the order in which their checks began."""

    checks: dict[str, Row] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # further tables, below

    def row(self, check: str) -> Row:
        """The row of a check."""
        return self.checks.setdefault(check, Row(check))

    def lines(self) -> list[str]:
        """A table, or nothing when no check ran."""
        if not self.checks:
            return []
        width = max(len(check) for check in self.checks)
        head = f"{'check':{width}}  {'turns':>5}  {'rows':>6}  {'inline':>10}  {'by handle':>10}"
        return [
            head,
            *(
                f"{row.check:{width}}  {row.turns:5d}  {row.rows:6d}  "
                f"{row.inline_bytes:8d} B  {row.handle_bytes:8d} B"
                for row in self.checks.values()
            ),
            *self.notes,
        ]
