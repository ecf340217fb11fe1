"""An audit of what is installed that needs no network: pinned, whole, and what the locks say."""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
LOCKS: Final = sorted(ROOT.glob("requirements*.lock"))
PIN: Final = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[A-Za-z0-9.!]+)")


def lines_of(lock: Path) -> list[str]:
    return [line for line in lock.read_text().splitlines() if line and not line.startswith("#")]


def pinned() -> list[tuple[str, str]]:
    lines = [line.partition("==") for lock in LOCKS for line in lines_of(lock)]
    return [(name, version) for name, _, version in lines]


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_locked_line_is_one_exact_version_from_the_index() -> None:
    """No range, no address, no local file: those would be in no bill of materials."""
    assert len(LOCKS) == 3
    loose = [line for lock in LOCKS for line in lines_of(lock) if not PIN.fullmatch(line)]
    assert not loose
    pins = {(plain(name), version) for name, version in pinned()}
    assert len(pins) == len({name for name, _ in pins}), "two locks may share a version, not two"


def test_what_is_installed_is_what_is_locked() -> None:
    versions = {plain(name): version for name, version in pinned()}
    differing = {
        f"{found.name} {found.version}"
        for found in metadata.distributions()
        if versions.get(plain(found.name), found.version) != found.version.split("+")[0]
    }
    assert not differing


def test_no_installed_package_lacks_what_it_needs() -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_the_bill_of_materials_and_the_audit_are_of_every_lock() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (locks,) = re.findall(r"^LOCKS := (.*)$", makefile, re.M)
    assert sorted(locks.split()) == [lock.name for lock in LOCKS]
