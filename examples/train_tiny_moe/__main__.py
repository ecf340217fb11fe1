"""``python -m examples.train_tiny_moe``."""

from typing import Final

from sideband.cli.entry import needing

# The others of the extra ``examples`` come with the services, without which nothing runs here.
_EXTRA: Final = {"rich", "safetensors", "torch", "typer"}

with needing(
    _EXTRA,
    program="python -m examples.train_tiny_moe",
    remedy="make torch, or pip install -e '.[examples]'",
):
    from examples.train_tiny_moe.cli import app

app()
