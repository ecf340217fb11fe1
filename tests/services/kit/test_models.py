"""The model of a service is read from its config.json, or the setting is named."""

from pathlib import Path

import pytest

from services.kit.models import load_model
from sideband.errors import InvalidInput

CONFIG = Path(__file__).parents[3] / "simulation" / "models" / "sim-uint8.json"


def test_a_model_is_what_its_config_says() -> None:
    assert load_model(None) is None
    model = load_model(CONFIG)
    assert model is not None
    assert model.top_k == 8


@pytest.mark.parametrize("content", [None, b"", b"[]", b"\xff", b'{"num_experts": "\xff"}'])
def test_what_is_no_config_names_the_setting(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidInput, match=r"model_config_path is '.*config\.json': must be a mod"):
        load_model(path)
    with pytest.raises(InvalidInput, match="model_config_path"):
        load_model(tmp_path)
