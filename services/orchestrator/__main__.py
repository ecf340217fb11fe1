"""``python -m services.orchestrator``: one run, settings from the environment."""

from services.kit.command import settings_of
from services.kit.run import Crash, serve
from services.orchestrator.app import create_app
from services.orchestrator.config import OrchestratorSettings

if __name__ == "__main__":
    settings = settings_of(OrchestratorSettings, "orchestrator")
    # A process that can do nothing more ends, so that whoever watches it starts another.
    crash = Crash()
    serve(create_app(settings, on_crash=crash), settings, crash=crash)
