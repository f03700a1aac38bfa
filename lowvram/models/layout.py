"""A model's weights as safetensors, and what it takes to build it: config.json with the classes of model and data."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any

from safetensors.torch import save_model
from torch import nn

from lowvram.config.secret import without_secrets
from lowvram.data.spec import DataSpec

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def save(model: nn.Module, config: Any, spec: DataSpec, folder: Path) -> None:
    """Write `folder`/model.safetensors and `folder`/config.json."""
    save_model(model, str(folder / WEIGHTS), metadata={"format": "pt"})
    write_json(folder / CONFIG, {"model": plain(config), "data": plain(spec)})


def write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(without_secrets(values), indent=2) + "\n")


def plain(config: Any) -> dict[str, Any]:
    """A frozen dataclass as plain values for JSON, with its class under `_target_`."""
    values = {name: value.name if isinstance(value, Enum) else value for name, value in asdict(config).items()}
    return {"_target_": target_of(type(config)), **values}


def target_of(cls: type) -> str:
    """The name under which `_target_` has a class."""
    return f"{cls.__module__}.{cls.__qualname__}"
