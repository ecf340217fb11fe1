"""Asks pip-audit for known weaknesses of locks: ``python scripts/audit.py PIP_AUDIT LOCK...``.

pip-audit ends well, too, where its source knows nothing: a mirror without advisories gives it
packages without any. So the source must first name the weakness of a release that has one. Where it
does not, the audit is skipped by name; see docs/decisions/0050-an-audit-must-find-something.md.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

WEAK_RELEASE: Final = "urllib3==1.24.1"  # CVE-2019-11324: a source that knows any knows it
TIMEOUT_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Findings:
    """What pip-audit found out: one line each."""

    sound: list[str] = field(default_factory=list)
    weak: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def findings_in(report: str) -> Findings:
    """What a report of pip-audit (``--format json``) says; ValueError where it is none."""
    found = Findings()
    for package in json.loads(report)["dependencies"]:
        if "skip_reason" in package:
            found.unknown.append(package["skip_reason"])
            continue
        name = f"{package['name']} {package['version']}"
        if not package["vulns"]:
            found.sound.append(name)
        for weakness in package["vulns"]:
            better = ", ".join(weakness["fix_versions"]) or "no release"
            found.weak.append(f"{name}: {weakness['id']}, mended in {better}")
    return found


def audit(tool: str, locks: Sequence[str]) -> tuple[bool, str]:
    """Whether there is nothing to do, and what to say of it."""
    with tempfile.TemporaryDirectory() as folder:
        weak_lock = Path(folder) / "weak.txt"
        weak_lock.write_text(WEAK_RELEASE + "\n")
        report, complaint = _ask(tool, [str(weak_lock)])
    if not report or not findings_in(report).weak:
        why = f"it names no weakness of {WEAK_RELEASE}, which has one" if report else complaint
        return True, f"SKIPPED, no source of advisories can be asked from here: {why}"
    report, complaint = _ask(tool, locks)
    return verdict(findings_in(report)) if report else (False, complaint)


def verdict(ours: Findings) -> tuple[bool, str]:
    """The same of what a source said that knows weaknesses."""
    if ours.weak or ours.unknown:
        unknown = [f"not known to the source: {reason}" for reason in ours.unknown]
        return False, "\n".join([*ours.weak, *unknown])
    return True, f"{len(ours.sound)} packages have no known weakness"


def _ask(tool: str, locks: Sequence[str]) -> tuple[str, str]:
    """The report, or nothing and why no source could be asked. A wrong call ends the program."""
    options = ["--format", "json", "--progress-spinner", "off", "--disable-pip", "--no-deps"]
    command = [tool, *options, *(word for lock in locks for word in ("-r", lock))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    complaint = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    if done.returncode not in (0, 1):  # 1: weaknesses, or a source out of reach
        sys.exit(f"audit: {complaint}")
    return done.stdout.strip(), complaint


if __name__ == "__main__":
    is_well, words = audit(sys.argv[1], sys.argv[2:])
    sys.stdout.write(f"audit: {words}\n")
    sys.exit(not is_well)
