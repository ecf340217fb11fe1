"""What is said when a server starts, by what its configuration means for requests by handle."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sideband.engines.vllm import state
from sideband.engines.vllm.checks import EngineFacts, check_engine
from sideband.engines.vllm.hooks.facts import read_facts, read_model_config
from tests.unit.engines.vllm.fakes import HF_CONFIG, Script, vllm_config
from tests.unit.engines.vllm.running import server

GOOD = EngineFacts(version="0.32.0", captures_routing=True, captures_masks=True, api_processes=1)


def codes(facts: EngineFacts) -> list[tuple[str, bool]]:
    return [(finding.code, finding.is_refusal) for finding in check_engine(facts)]


def test_a_good_server_has_nothing_to_say() -> None:
    assert codes(GOOD) == []
    assert codes(replace(GOOD, connectors=("ExampleConnector",))) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"captures_routing": False}, [("no_routing", False)]),
        ({"captures_masks": False}, [("no_masks", False)]),
        ({"uses_v2_runner": False}, [("masks_unsupported", True)]),
        ({"is_speculative": True}, []),
        ({"is_speculative": True, "is_adaptive": True}, [("masks_unsupported", True)]),
        ({"is_speculative": True, "version": "0.31.0"}, [("masks_unsupported", True)]),
        ({"is_speculative": True, "version": "dev"}, [("masks_unsupported", True)]),
        ({"logprobs_mode": "raw_logprobs"}, [("masks_unsupported", True)]),
        ({"captures_masks": False, "uses_v2_runner": False}, [("no_masks", False)]),
    ],
)
def test_masks_that_an_engine_cannot_return_are_refused_at_the_start(
    changes: dict[str, Any], expected: list[tuple[str, bool]]
) -> None:
    assert codes(replace(GOOD, **changes)) == expected


@pytest.mark.parametrize("connector", ["NixlConnector", "MooncakeConnector", "MoRIIOConnector"])
def test_routing_beside_a_connector_that_vllm_refuses_is_named(connector: str) -> None:
    (finding,) = check_engine(replace(GOOD, connectors=("MultiConnector", connector)))
    assert finding.code == "routing_with_connector"
    assert connector in finding.message
    assert codes(replace(GOOD, connectors=(connector,), captures_routing=False)) == [
        ("no_routing", False)
    ]


def test_facts_are_read_as_0_32_lays_its_config_out() -> None:
    assert read_facts(vllm_config(), version="0.32.0") == GOOD
    config = vllm_config(
        enable_return_routed_experts=False,
        return_sampling_mask=False,
        speculative_config=SimpleNamespace(enable_adaptive_verification=True),
        use_v2_model_runner=False,
        logprobs_mode="raw_logprobs",
        api_processes=4,
        kv_transfer_config=SimpleNamespace(
            kv_connector="MultiConnector",
            kv_connector_extra_config={"connectors": [{"kv_connector": "NixlConnector"}]},
        ),
    )
    assert read_facts(config, version="0.32.0") == EngineFacts(
        version="0.32.0",
        captures_routing=False,
        captures_masks=False,
        connectors=("MultiConnector", "NixlConnector"),
        is_speculative=True,
        is_adaptive=True,
        uses_v2_runner=False,
        logprobs_mode="raw_logprobs",
        api_processes=4,
    )
    assert read_model_config(config) == HF_CONFIG


def test_facts_are_read_as_0_30_lays_its_config_out() -> None:
    model_config = SimpleNamespace(enable_return_routed_experts=True, logprobs_mode="raw_logprobs")
    config = SimpleNamespace(model_config=model_config, kv_transfer_config=None)
    facts = read_facts(config, version="0.30.0")
    assert (facts.captures_routing, facts.captures_masks) == (True, False)
    assert facts.api_processes == 0  # not known
    assert [code for code, _ in codes(facts)] == ["no_masks"]


@pytest.mark.parametrize("root", [False, True])
def test_what_writers_use_is_compiled_before_the_first_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: bool
) -> None:
    """Compiling beside requests would make them wait."""
    compiled: list[bool] = []
    monkeypatch.setattr(state, "compile_loops", lambda: compiled.append(True))
    server(tmp_path, Script(), root=root)
    assert compiled == [True] * root
