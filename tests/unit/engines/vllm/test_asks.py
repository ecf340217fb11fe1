"""What a request may ask the plugin for: only folders right below the engine's own root."""

from pathlib import Path
from typing import Any

import pytest

from sideband.engines.vllm.asks import open_target, read_ask
from sideband.engines.vllm.errors import AskRefused
from sideband.ids import RunId
from sideband.payload.durable import DurableFolders
from sideband.payload.root import PayloadRoot

ROOT = Path("/mnt/run/payloads")


@pytest.mark.parametrize("extra", [None, {}, {"payload_dir": None}, {"kv_transfer_params": {}}])
def test_a_request_without_a_folder_is_inline(extra: dict[str, Any] | None) -> None:
    for root in (ROOT, None):
        ask = read_ask(extra, root=root, request_id="any id at all /")
        assert ask.place is None
        assert not ask.is_debug


def test_a_version_folder_of_the_own_root_is_a_place() -> None:
    extra = {
        "payload_dir": "/mnt/run/payloads/v12/",
        "payload_run_id": "run-1",
        "payload_debug": True,
    }
    ask = read_ask(extra, root=ROOT, request_id="r.a1.p")
    assert ask.is_debug
    assert ask.place is not None
    assert (ask.place.policy_version, ask.place.run_id) == (12, "run-1")
    assert ask.place.request_id == "r.a1.p"


@pytest.mark.parametrize(
    "folder",
    [
        "/mnt/run/payloads",
        "/mnt/run/payloads/v1/run-1",
        "/mnt/run/payloads/x/../v1",
        "/mnt/run/payloads/../payloads/v1",
        "/mnt/run/v1",
        "/v1",
        "v1",
        "",
        "/mnt/run/payloads/v-1",
        "/mnt/run/payloads/v01",
        "/mnt/run/payloads/v1\x00",
        "/mnt/run/payloadsv1",
        "/" + "x" * 10_000 + "/v1",
        7,
        ["/mnt/run/payloads/v1"],
        False,
    ],
)
def test_any_other_folder_is_refused_by_name(folder: Any) -> None:
    with pytest.raises(AskRefused, match=r"extra_args\.payload_dir: must be") as caught:
        read_ask({"payload_dir": folder}, root=ROOT, request_id="r1")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("run_id", ["", "a/b", "..", 7, "x" * 129])
def test_a_run_that_cannot_be_is_refused(run_id: Any) -> None:
    extra = {"payload_dir": "/mnt/run/payloads/v1", "payload_run_id": run_id}
    with pytest.raises(AskRefused, match="payload_run_id"):
        read_ask(extra, root=ROOT, request_id="r1")


def test_a_request_id_that_cannot_name_a_file_is_refused() -> None:
    with pytest.raises(AskRefused, match="request_id"):
        read_ask({"payload_dir": "/mnt/run/payloads/v1"}, root=ROOT, request_id="../../etc")


def test_an_engine_without_a_root_says_so() -> None:
    with pytest.raises(AskRefused, match="SIDEBAND_VLLM_PAYLOAD_ROOT"):
        read_ask({"payload_dir": "/mnt/run/payloads/v1"}, root=None, request_id="r1")


@pytest.mark.parametrize("value", [1, "true", None, []])
def test_the_debug_flag_is_a_flag(value: Any) -> None:
    with pytest.raises(AskRefused, match="payload_debug"):
        read_ask({"payload_debug": value}, root=None, request_id="r1")


def place_in(root: Path, **extra: Any) -> Any:
    found = read_ask({"payload_dir": f"{root}/v1", **extra}, root=root, request_id="r1").place
    assert found is not None
    return found


def test_the_root_must_be_one_and_belong_to_the_run(tmp_path: Path) -> None:
    durable = DurableFolders()
    with pytest.raises(AskRefused, match="payload_dir"):
        open_target(place_in(tmp_path / "none"), durable=durable)
    PayloadRoot.create(tmp_path / "root", RunId("run-1"), fresh=True)
    target = open_target(place_in(tmp_path / "root"), durable=durable)
    assert target.root.run_id == "run-1"
    with pytest.raises(AskRefused, match="run-2"):
        open_target(place_in(tmp_path / "root", payload_run_id="run-2"), durable=durable)
