"""Weights from and to a Hugging Face model folder: ``config.json`` and ``*.safetensors``."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from examples.train_tiny_moe.config import TinyMoeConfig
from examples.train_tiny_moe.model import TinyMoe
from sideband import ResumePoint

CONFIG_NAME: Final = "config.json"
WEIGHTS_NAME: Final = "model.safetensors"
POINT_KEY: Final = "sideband"
INIT_STD: Final = 0.2  # large for a model this small, so that routers and kept sets are not flat


class WrongWeights(Exception):
    """A model folder whose weights are not this model's."""


def load_model(folder: Path, *, dtype: torch.dtype = torch.float32) -> TinyMoe:
    """The model of a folder, in ``dtype``. Raises WrongWeights when names or shapes differ."""
    model = TinyMoe(TinyMoeConfig.load(folder / CONFIG_NAME))
    return load_weights(model, sorted(folder.glob("*.safetensors"))).to(dtype)


def load_weights(model: TinyMoe, paths: Sequence[Path]) -> TinyMoe:
    """The same model with the weights of some files. Raises WrongWeights."""
    weights: dict[str, torch.Tensor] = {}
    for path in paths:
        weights |= load_file(path)
    try:
        model.load_state_dict(weights)
    except RuntimeError as exc:  # torch says which names are missing, unknown or of another shape
        raise WrongWeights(f"{[path.name for path in paths]}: {exc}") from exc
    return model


def make_model_folder(folder: Path, config_path: Path, *, seed: int) -> None:
    """A folder with random weights, rounded to bfloat16 as an engine would hold them."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads(config_path.read_text())
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2))
    generator = torch.Generator().manual_seed(seed)
    model = TinyMoe(TinyMoeConfig.of(config))
    for parameter in model.parameters():
        if parameter.ndim > 1:  # norms keep their ones
            torch.nn.init.normal_(parameter, std=INIT_STD, generator=generator)
    save_weights(model.to(torch.bfloat16), folder / WEIGHTS_NAME)


def save_weights(model: TinyMoe, path: Path, *, point: ResumePoint | None = None) -> None:
    """Every parameter under its checkpoint name, whole or not at all; ``point`` says of which step
    they are, for the feed."""
    staging = path.with_suffix(".staging")
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, staging, metadata=None if point is None else {POINT_KEY: json.dumps(point)})
    staging.replace(path)


def resume_point_of(folder: Path) -> dict[str, object] | None:
    """What was kept with the weights of a folder: None where no trainer of a run saved them."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            kept = (file.metadata() or {}).get(POINT_KEY)
        if kept is not None:
            point: dict[str, object] = json.loads(kept)
            return point
    return None
