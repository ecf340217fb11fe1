"""``python -m scripts.vllm_env [--dir .vllm] [0.32 0.30]``: build, and say how long it took.

A line that cannot be built here is reported and leaves ``why-not``: the tests that need it are
skipped by name with that reason.
"""

import argparse
import sys
import time
from pathlib import Path

from scripts.vllm_env.build import LINES, CannotBuild, build


def main() -> int:
    """The number of lines that could not be built."""
    parser = argparse.ArgumentParser(prog="python -m scripts.vllm_env", description=__doc__)
    parser.add_argument("lines", nargs="*", choices=[*LINES, []], default=[], metavar="LINE")
    parser.add_argument("--dir", type=Path, default=Path(".vllm"), help="default: .vllm")
    arguments = parser.parse_args()
    missing = 0
    for line in arguments.lines or LINES:
        started_s = time.monotonic()
        try:
            folder = build(line, arguments.dir)
        except CannotBuild as exc:
            missing += 1
            sys.stderr.write(f"vllm {line}: cannot be built here: {exc}\n")
        else:
            took_s = time.monotonic() - started_s
            sys.stdout.write(
                f"vllm {line}: ready in {took_s:.0f} s: {folder}/serve.sh PORT MODEL\n"
            )
    return missing


if __name__ == "__main__":
    sys.exit(main())
