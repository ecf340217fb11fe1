"""Splits ``pip freeze`` on standard input into requirements.lock and requirements-torch.lock.

torch and what only torch needs go apart, so that ``make demo`` never downloads them.
"""

import re
import sys
from pathlib import Path

TORCH_ONLY = {
    *("torch", "filelock", "fsspec", "jinja2", "mpmath", "networkx", "sympy"),
    "safetensors",  # the examples' checkpoints
}


def name_of(line: str) -> str:
    """The normalised distribution name of a pinned line."""
    return re.split(r"[=<>@ ]", line, maxsplit=1)[0].lower().replace("_", "-")


def main() -> None:
    """Write both files beside pyproject.toml, sorted; local version tags (``+cpu``) are dropped."""
    root = Path(__file__).parent.parent
    lines = sorted(
        {line.split("+")[0].strip() for line in sys.stdin if "==" in line}, key=str.lower
    )
    base = [line for line in lines if name_of(line) not in TORCH_ONLY]
    torch = [line for line in lines if name_of(line) in TORCH_ONLY]
    for name, pins in (("requirements.lock", base), ("requirements-torch.lock", torch)):
        if pins:
            (root / name).write_text("# Written by `make lock`.\n" + "\n".join(pins) + "\n")


if __name__ == "__main__":
    main()
