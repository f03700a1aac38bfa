"""`model/` in a run's folder: what was trained, and what it takes to build the plain model."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig
from safetensors.torch import load_model
from torch import nn

from lowvram.config import build
from lowvram.core.rig import assemble
from lowvram.data.spec import DataSpec, Modality, layout_from
from lowvram.knobs.adapter.parts import Adapter
from lowvram.models.layout import CONFIG, WEIGHTS, plain, write_json
from lowvram.tasks import Auto, ModelConfig

APART = "lowvram.json"  # beside an adapter: what it is to be put into


class Origin(NamedTuple):
    """What a model was made from."""

    config: ModelConfig
    spec: DataSpec
    adapter: Adapter
    seed: int


def export(folder: Path, model: nn.Module, origin: Origin, merge: bool) -> None:
    """Write a whole model, or what an adapter has learnt alone.

    Args:
        merge: write a whole model in any case.
    """
    config, spec, adapter, seed = origin
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if merge or not adapter.save_apart(model, folder, config.base):
        config.save(adapter.merged(model, partial(config.make, spec)), spec, folder)
        return
    named = {} if config.base is None else {"name": config.base}
    described = {"model": {**plain(config), **named}, "data": plain(spec), "adapter": plain(adapter), "seed": seed}
    write_json(folder / APART, described)


def load(folder: str | Path) -> Any:
    """The plain model of a run's `model` folder with its trained weights, on the CPU: no knob, no framework. What was
    trained apart is merged into what it was trained beside."""
    folder = Path(folder)
    if (folder / APART).is_file():
        return with_adapter(folder)
    described = json.loads((folder / CONFIG).read_text())
    if "data" not in described:
        return from_transformers(folder, described["architectures"][0])
    config, spec = described_problem(described)
    model = config.make(spec)
    load_model(model, str(folder / WEIGHTS))
    return model


def with_adapter(folder: Path) -> nn.Module:
    """The model that was adapted, made again, and what it has learnt."""
    described = json.loads((folder / APART).read_text())
    adapter = build(DictConfig(described["adapter"]), "adapter")
    task = Auto().pose(*described_problem(described))
    model = assemble(task, {"adapter": adapter}, torch.device("cpu"), described["seed"]).model
    adapter.read_apart(model, folder)
    return adapter.merged(model, task.make_model)


def described_problem(described: dict[str, Any]) -> tuple[ModelConfig, DataSpec]:
    data = described["data"]
    layout = data.get("layout") and layout_from(data["layout"])
    shape, vocab_size = tuple(data["shape"]), data.get("vocab_size")
    spec = DataSpec(Modality[data["modality"]], data["num_classes"], shape, vocab_size, layout)
    return build(DictConfig(described["model"]), "model"), spec


def from_transformers(folder: Path, architecture: str) -> nn.Module:
    import transformers

    return getattr(transformers, architecture).from_pretrained(folder, use_safetensors=True, trust_remote_code=False)
