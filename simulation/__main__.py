"""``python -m simulation``."""

from simulation.cli import app

if __name__ == "__main__":
    app()
