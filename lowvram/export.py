"""`model/` in a run's folder: the trained weights as safetensors, and what it takes to build the plain model."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from safetensors.torch import load_model, save_model
from torch import nn

from lowvram.config import build
from lowvram.data.spec import DataSpec, Modality
from lowvram.tasks import ModelConfig

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def export(folder: Path, model: nn.Module, config: ModelConfig, spec: DataSpec) -> None:
    """Write `folder`/model.safetensors and `folder`/config.json."""
    folder.mkdir(exist_ok=True)
    save_model(model, str(folder / WEIGHTS), metadata={"format": "pt"})
    described = {"model": plain(config), "data": plain(spec)}
    (folder / CONFIG).write_text(json.dumps(described, indent=2) + "\n")


def load(folder: str | Path) -> nn.Module:
    """The plain model of a run's `model` folder with its trained weights, on the CPU: no knob, no framework."""
    described = json.loads((Path(folder) / CONFIG).read_text())
    data = described["data"]
    spec = DataSpec(Modality[data["modality"]], data["num_classes"], tuple(data["shape"]))
    model = build(DictConfig(described["model"]), "model").make(spec)
    load_model(model, str(Path(folder) / WEIGHTS))
    return model


def plain(config: Any) -> dict[str, Any]:
    """A frozen dataclass as JSON has it, with its class."""
    values = {name: value.name if isinstance(value, Enum) else value for name, value in asdict(config).items()}
    return {"_target_": f"{type(config).__module__}.{type(config).__qualname__}", **values}
