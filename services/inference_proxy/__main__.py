"""``python -m services.inference_proxy``: settings from the environment, then serve."""

from services.inference_proxy.app import create_app
from services.inference_proxy.config import ProxySettings
from services.kit.run import serve


def main() -> None:
    """Run the proxy until it is told to stop."""
    settings = ProxySettings()
    serve(create_app(settings), settings)


if __name__ == "__main__":
    main()
