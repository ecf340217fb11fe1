"""Against a real vLLM: its recorded answers, and the weights that it ran with.

A trainer in float32 with the engine's own weights must choose the engine's experts almost always,
and give its logprobs: this is only so when rows, layers and kept sets mean what is written here.
"""

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

from examples.train_tiny_moe.answers import UnusableAnswer, read_answers
from examples.train_tiny_moe.config import TinyMoeConfig
from examples.train_tiny_moe.delivery import Writer
from examples.train_tiny_moe.learner import Use
from examples.train_tiny_moe.mismatch import measure
from examples.train_tiny_moe.rows import TokenRows
from examples.train_tiny_moe.weights import load_model
from sideband import PayloadRoot
from sideband.ids import RunId
from tests.examples.support import CONFIG_PATH

pytestmark = pytest.mark.torch

DATA = Path(__file__).parents[1] / "data" / "vllm"
ANSWERS = DATA / "0.32-logprobs.jsonl"


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(CONFIG_PATH, folder / "config.json")
    shutil.copy(DATA / "tiny-moe.safetensors", folder / "model.safetensors")
    return folder


@pytest.mark.usefixtures("without_gradients")
def test_the_engines_experts_are_the_models_own_choice(model_folder: Path) -> None:
    model, agreeing, shifted, rows = load_model(model_folder), 0, 0, 0
    for rollout in read_answers(ANSWERS):
        (turn,) = rollout.turns
        assert turn.experts_NAK is not None
        ran = model(TokenRows.of_sequence(torch.tensor(turn.token_ids), None)).experts_NK
        engines = torch.from_numpy(turn.experts_NAK).long()
        for layer in model.config.shape.layer_ids:
            own, theirs = ran[layer].sort().values, engines[:, layer].sort().values
            agreeing += int((own[:-1] == theirs).all(-1).sum())
            shifted += int((own[1:] == theirs).all(-1).sum())
            rows += len(theirs)
    assert rows > 1500
    assert agreeing > 0.93 * rows
    assert shifted < 0.1 * rows


def test_replay_brings_the_trainer_closer_to_the_engine(model_folder: Path, tmp_path: Path) -> None:
    """All answers the whole way: payload files, orchestrator, feed and a rank."""
    found = asyncio.run(measure(model_folder, ANSWERS, tmp_path))
    neither, both = found[Use(routing=False, masks=False)], found[Use(routing=True, masks=True)]
    masks = found[Use(routing=False, masks=True)]
    assert neither.tokens == both.tokens == 184
    assert both.mean_distance < 0.02 < 0.5 < neither.mean_distance
    assert both.mean_distance < 0.8 * masks.mean_distance
    assert both.mean_k3 < 0.5 * masks.mean_k3 < 0.01 * neither.mean_k3


def test_answers_by_handle_are_read_as_their_inline_form(tmp_path: Path) -> None:
    root = PayloadRoot.create(tmp_path / "payloads", RunId("recorded"), fresh=True)
    writer = Writer(root=root, model=TinyMoeConfig.load(CONFIG_PATH).shape)
    expected = read_answers(ANSWERS)
    lines = []
    for line, rollout in zip(ANSWERS.read_text().splitlines(), expected, strict=True):
        body = writer.turn_body(rollout.turns[0], policy_version=0)
        answer = json.loads(line)
        answer["response"]["payload_segments"] = {"0": body["payload_segments"]}
        answer["response"]["payload_model"] = body["payload_model"]
        answer["response"]["choices"][0] |= {"routed_experts": None, "sampling_mask": None}
        lines.append(json.dumps(answer))
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(UnusableAnswer, match="line 1: by handle"):
        read_answers(path)
    for found, inline in zip(read_answers(path, root.path), expected, strict=True):
        (turn,), (wanted,) = found.turns, inline.turns
        assert wanted.experts_NAK is not None
        np.testing.assert_array_equal(turn.experts_NAK, wanted.experts_NAK)
        assert (turn.kept_C, turn.token_ids) == (wanted.kept_C, wanted.token_ids)


def test_an_answer_without_logprobs_is_named(tmp_path: Path) -> None:
    line = ANSWERS.read_text().splitlines()[0]
    without = line.replace('"logprobs":{', '"logprobs":null,"spare":{')
    path = tmp_path / "answers.jsonl"
    path.write_text(f"{line}\n{without}\n")
    with pytest.raises(UnusableAnswer, match="line 2"):
        read_answers(path)
