"""The plugin's settings: a closed set, each fault named."""

from pathlib import Path

import pytest

from sideband.engines.vllm.settings import PluginSettings, read_settings
from sideband.errors import InvalidInput
from sideband.payload.encodings import Encodings


def test_without_variables_all_stays_inline() -> None:
    assert read_settings({"PATH": "/bin", "VLLM_PLUGINS": "x"}) == PluginSettings()
    assert read_settings({"SIDEBAND_VLLM_PAYLOAD_ROOT": ""}).payload_root is None


def test_every_variable_is_read() -> None:
    found = read_settings(
        {
            "SIDEBAND_VLLM_PAYLOAD_ROOT": "/mnt/run/payloads/",
            "SIDEBAND_VLLM_WRITE_THREADS": "9",
            "SIDEBAND_VLLM_ACCEPT_VERSION": "0.34",
            "SIDEBAND_VLLM_ROUTING_ENCODING": "packed",
        }
    )
    assert found == PluginSettings(
        payload_root=Path("/mnt/run/payloads"),
        write_threads=9,
        accept_version="0.34",
        encodings=Encodings(routing="packed"),
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PAYLOAD_ROOT", "run/payloads"),
        ("WRITE_THREADS", "0"),
        ("WRITE_THREADS", "65"),
        ("WRITE_THREADS", "four"),
        ("ACCEPT_VERSION", "0.34.1"),
        ("ACCEPT_VERSION", "any"),
        ("ROUTING_ENCODING", "gzip"),
        ("PAYLOADROOT", "/mnt"),
    ],
)
def test_a_setting_that_cannot_be_is_named(name: str, value: str) -> None:
    with pytest.raises(InvalidInput, match=f"SIDEBAND_VLLM_{name} is"):
        read_settings({f"SIDEBAND_VLLM_{name}": value})
