"""``python -m services.orchestrator``: one run, settings from the environment."""

from services.kit.run import serve
from services.orchestrator.app import create_app
from services.orchestrator.config import OrchestratorSettings

if __name__ == "__main__":
    settings = OrchestratorSettings()
    serve(create_app(settings), settings)
