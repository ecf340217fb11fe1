"""A private PostgreSQL server in a temporary folder, for benches and tests."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from bench.http.processes import free_port

USER: Final = "sideband"
START_TIMEOUT_S: Final = 40


def binaries() -> Path | None:
    """The folder with initdb and pg_ctl; Debian keeps it off the path. None: not installed."""
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).parent
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: p.parts[-3])
    return folders[-1].parent if folders else None


@contextlib.contextmanager
def server(folder: Path) -> Iterator[str]:
    """The URL of an empty server on a free port of loopback. ``folder`` has the binaries."""
    with TemporaryDirectory(prefix="sideband-pg-") as home:
        # The server refuses to run as root: then as nobody, who must own the folder.
        user = "nobody" if os.geteuid() == 0 else None
        if user is not None:
            shutil.chown(home, user)

        def run(name: str, *arguments: str) -> None:
            subprocess.run(
                [str(folder / name), *arguments],
                user=user,
                extra_groups=[] if user else None,
                cwd=home,
                env={"PATH": os.defpath, "LC_ALL": "C"},
                stdout=subprocess.DEVNULL,
                check=True,
                timeout=START_TIMEOUT_S,
            )

        data, port = f"{home}/data", free_port()
        run("initdb", "-D", data, "-A", "trust", "-U", USER, "-E", "UTF8", "--no-sync")
        options = f"-p {port} -h 127.0.0.1 -k {home}"
        control = ("-D", data, "-w", "-t", str(START_TIMEOUT_S - 10), "-l", f"{home}/log")
        run("pg_ctl", *control, "-o", options, "start")
        try:
            yield f"postgresql://{USER}@127.0.0.1:{port}/postgres"
        finally:
            run("pg_ctl", *control, "-m", "immediate", "stop")
