"""``make audit`` with a tool that answers as pip-audit does: weak, sound, unknown, no network."""

import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from scripts.audit import WEAK_RELEASE

ROOT: Final = Path(__file__).parent.parent
Package = dict[str, Any]


def sound(name: str) -> Package:
    return {"name": name, "version": "1.0", "vulns": []}


def weak(name: str) -> Package:
    return {**sound(name), "vulns": [{"id": "CVE-1", "fix_versions": ["1.1", "2.0"]}]}


def unknown(name: str) -> Package:
    return {"name": name, "skip_reason": f"{name} is not there"}


def audit(
    folder: Path, known: list[Package] | str, ours: list[Package]
) -> subprocess.CompletedProcess[str]:
    """Run it with a source that says ``known`` of the weak release, and ``ours`` of the lock.

    Words instead of packages: the tool fails with them. A word ``usage`` is a wrong call.
    """
    lock = folder / "a.lock"
    lock.write_text("a==1.0\n")
    tool = folder / "pip-audit"
    tool.write_text(
        f"#!{sys.executable}\n"
        "import json, pathlib, sys\n"
        "lock = pathlib.Path(sys.argv[sys.argv.index('-r') + 1]).read_text()\n"
        f"known, ours = {known!r}, {ours!r}\n"
        f"found = known if lock.strip() == {WEAK_RELEASE!r} else ours\n"
        "if isinstance(found, str):\n"
        "    print('Traceback', found, sep='\\n', file=sys.stderr)\n"
        "    sys.exit(2 if found == 'usage' else 1)\n"
        "print(json.dumps({'dependencies': found, 'fixes': []}))\n"
        "sys.exit(any(package.get('vulns') for package in found))\n"
    )
    tool.chmod(0o755)
    command = [sys.executable, str(ROOT / "scripts/audit.py"), str(tool), str(lock)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


KNOWN: Final = [weak("urllib3")]


def test_a_lock_without_a_known_weakness_is_well(tmp_path: Path) -> None:
    done = audit(tmp_path, KNOWN, [sound("a"), sound("b")])
    assert (done.returncode, done.stdout) == (0, "audit: 2 packages have no known weakness\n")


def test_a_weakness_is_named_with_what_mends_it(tmp_path: Path) -> None:
    done = audit(tmp_path, KNOWN, [sound("a"), weak("b")])
    assert (done.returncode, done.stdout) == (1, "audit: b 1.0: CVE-1, mended in 1.1, 2.0\n")


def test_a_package_that_the_source_does_not_know_was_not_audited(tmp_path: Path) -> None:
    done = audit(tmp_path, KNOWN, [sound("a"), unknown("b")])
    assert done.returncode == 1
    assert done.stdout == "audit: not known to the source: b is not there\n"


@pytest.mark.parametrize(
    ("known", "why"),
    [
        ([unknown("urllib3")], f"it names no weakness of {WEAK_RELEASE}, which has one"),
        ([sound("urllib3")], f"it names no weakness of {WEAK_RELEASE}, which has one"),
        ("no such host", "no such host"),
    ],
    ids=["a mirror that knows no release", "a mirror without advisories", "no network"],
)
def test_a_source_that_knows_nothing_skips_the_audit_by_name(
    known: list[Package] | str, why: str, tmp_path: Path
) -> None:
    done = audit(tmp_path, known, [sound("a")])
    assert done.returncode == 0
    assert done.stdout == (
        f"audit: SKIPPED, no source of advisories can be asked from here: {why}\n"
    )


def test_a_wrong_call_is_no_reason_to_skip(tmp_path: Path) -> None:
    done = audit(tmp_path, "usage", [])
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "audit: usage\n")
