"""``python -m services.inference_proxy``: settings from the environment, then serve."""

from services.inference_proxy.app import create_app
from services.inference_proxy.config import ProxySettings
from services.kit.command import settings_of
from services.kit.memory import settle
from services.kit.run import serve


def main() -> None:
    """Run the proxy until it is told to stop."""
    settings = settings_of(ProxySettings, "inference_proxy")
    app = create_app(settings)
    settle()
    serve(app, settings)


if __name__ == "__main__":
    main()
