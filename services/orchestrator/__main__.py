"""``python -m services.orchestrator``: one run, settings from the environment."""

from services.kit.command import settings_of
from services.kit.run import serve
from services.orchestrator.app import create_app
from services.orchestrator.config import OrchestratorSettings

if __name__ == "__main__":
    settings = settings_of(OrchestratorSettings, "orchestrator")
    serve(create_app(settings), settings)
