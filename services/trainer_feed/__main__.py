"""``python -m services.trainer_feed``: settings from the environment, then serve."""

from services.kit.command import settings_of
from services.kit.run import serve
from services.trainer_feed.app import create_app
from services.trainer_feed.config import FeedSettings


def main() -> None:
    """Run the feed until it is told to stop."""
    settings = settings_of(FeedSettings, "trainer_feed")
    serve(create_app(settings), settings)


if __name__ == "__main__":
    main()
