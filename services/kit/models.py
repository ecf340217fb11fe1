"""The model that a service's ``model_config_path`` names."""

from pathlib import Path
from typing import Any

import msgspec

from sideband.errors import InvalidInput
from sideband.model import ModelShape
from sideband.routing import model_shape


def load_model(path: Path | None) -> ModelShape | None:
    """The fingerprint of the model whose config.json is at ``path``. Blocks.

    Raises InvalidInput for a file that is none, and what ``model_shape`` raises.
    """
    if path is None:
        return None
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as exc:
        rule = f"must be a model's config.json: {exc}"
        raise InvalidInput("model_config_path", str(path), rule) from exc
    return model_shape(config).check()
