"""``python -m sideband.cli`` and the console script ``sideband``."""

from sideband.cli.entry import main

if __name__ == "__main__":
    main()
