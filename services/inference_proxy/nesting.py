"""How deep JSON may nest: what is read must also be written again, and walked, in bounded stack.

The parser reads 1024 levels, the writers and every recursive walk end far below: whatever goes on
to somebody else is bounded where it comes in. Pure.
"""

from typing import Final

NESTING_MAX: Final = 128  # real bodies have about ten levels


def brackets_of(content: bytes) -> int:
    """How many brackets the text opens, those in strings too: it nests no deeper."""
    return content.count(b"[") + content.count(b"{")


def is_surely_flat(content: bytes) -> bool:
    """Whether the text opens too few brackets to nest too deep; most bodies do."""
    return brackets_of(content) <= NESTING_MAX


def is_too_deep(content: bytes, value: object) -> bool:
    """Whether ``value``, parsed from ``content``, nests more than NESTING_MAX levels."""
    if is_surely_flat(content):
        return False
    level: list[object] = [value]
    for _ in range(NESTING_MAX):
        level = [
            item
            for outer in level
            if isinstance(outer, (list, dict))
            for item in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(item, (list, dict))
        ]
        if not level:
            return False
    return True
