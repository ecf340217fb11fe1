"""``python -m services.inference_proxy``: settings from the environment, then serve."""

from services.inference_proxy.config import ProxySettings
from services.inference_proxy.workers.serving import serve_proxy
from services.kit.command import settings_of


def main() -> None:
    """Run the proxy until it is told to stop."""
    serve_proxy(settings_of(ProxySettings, "inference_proxy"))


if __name__ == "__main__":
    main()
