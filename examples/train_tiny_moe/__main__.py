"""``python -m examples.train_tiny_moe``."""

from examples.train_tiny_moe.cli import app

app()
