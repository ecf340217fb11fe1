"""The simulated models: real shapes behind short configs, one for each width of expert ids."""

import json
from pathlib import Path
from typing import Final

from sideband.errors import InvalidInput
from sideband.model import ModelShape
from sideband.routing import model_shape

FOLDER: Final = Path(__file__).parent
NAMES: Final = ("sim-uint8", "sim-uint16")


def config_path(name_or_path: str) -> Path:
    """The hf config of a simulated model by its name, or any config by its path."""
    return FOLDER / f"{name_or_path}.json" if name_or_path in NAMES else Path(name_or_path)


def load_shape(name_or_path: str) -> ModelShape:
    """The model's fingerprint. Raises InvalidInput for a file that is no config."""
    path = config_path(name_or_path)
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as exc:
        raise InvalidInput("model_config", str(path), "must be a readable JSON file") from exc
    return model_shape(config)
