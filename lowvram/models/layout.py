"""A model's weights as safetensors, and what it takes to build it: config.json with the classes of model and data."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_model, save_file, save_model
from torch import Size, Tensor, dtype, nn

from lowvram.config.errors import BadInput
from lowvram.config.secret import without_secrets
from lowvram.core.extra_state import extra_states, give, hidden
from lowvram.core.mesh import tell
from lowvram.core.shared_memory import in_one_memory
from lowvram.data.spec import DataSpec
from lowvram.models.wrappers import plain_names, taken_off
from lowvram.results.files.other_format import check_safetensors
from lowvram.results.files.regular import read_regular

EXPORTED = "model"  # in the folder of a run: the folder of its exported model
WEIGHTS, CONFIG, EXTRA = "model.safetensors", "config.json", "extra_state.pt"
UNREADABLE = (OSError, SafetensorError)  # files of weights


def save(model: nn.Module, config: Any, spec: DataSpec, folder: Path) -> None:
    """Write `folder`/model.safetensors and `folder`/config.json, and what modules keep besides tensors."""
    with hidden(model):
        if in_one_memory([*model.parameters(), *model.buffers()]):
            save_each(model, folder / WEIGHTS)
        else:
            save_model(model, str(folder / WEIGHTS), metadata={"format": "pt"})
    if states := extra_states(model):
        torch.save(states, folder / EXTRA)
    write_json(folder / CONFIG, {"model": plain(config), "data": plain(spec)})


def save_each(model: nn.Module, path: Path) -> None:
    """Write weights of which some lie in one memory without being one tensor, each by itself: safetensors' own function
    refuses those that don't fill their memory. Tied ones are written once, as there."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    kept = {name: first.setdefault(id(tensor), name) for name, tensor in sorted(state.items())}
    tensors = {name: state[name].detach().clone().contiguous() for name in first.values()}
    save_file(tensors, str(path), {"format": "pt", **{name: other for name, other in kept.items() if name != other}})


def weights_in(folder: str) -> Path:
    """The weights of an exported model, given its folder or that of its run. Raises BadInput, of `model.init`, if there
    are none, or they are in another format."""
    places = [Path(folder).expanduser() / inner for inner in (EXPORTED, "")]
    for place in places:
        check_safetensors(place, "model.init", folder)
    found = next((place / WEIGHTS for place in places if (place / WEIGHTS).is_file()), None)
    if found is None:
        allowed = f"the folder of a finished run, or of an exported model: it has no {WEIGHTS}"
        raise BadInput("model.init", folder, allowed)
    return found


def read_tensor(folder: str, name: str, shape: Size) -> Tensor:
    """One tensor of an exported model, on the CPU.

    Raises:
        BadInput: the weights, of `model.init`, can't be read, or belong to a model of other sizes.
    """
    try:
        with safe_open(weights_in(folder), "pt") as file:
            about = file.metadata() or {}
            changed = plain_names({*file.keys(), *about}, (name,))
            there = next((wrapped for wrapped, bare in changed.items() if bare == name), name)
            kept = about.get(there, there)  # tied tensors are saved under one of their names
            saved = file.get_tensor(kept) if kept in file.keys() else None  # noqa: SIM118  # it is no dictionary
    except UNREADABLE as error:
        raise unreadable(folder, error) from None
    there = "missing" if saved is None else str(tuple(saved.shape))
    allowed = f"the folder of a model of these sizes: {name} is {there} there, and {tuple(shape)} here"
    if saved is None or saved.shape != shape:
        raise BadInput("model.init", folder, f"{allowed}; its {CONFIG} tells its sizes")
    return saved


def names_at(folder: str, paths: Iterable[Path]) -> list[str]:
    """The names of all tensors of `model.init`. Raises BadInput if they can't be read."""
    try:
        return names_in(paths)
    except UNREADABLE as error:
        raise unreadable(folder, error) from None


def unreadable(folder: str, error: Exception) -> BadInput:
    return BadInput("model.init", folder, f"an exported model whose {WEIGHTS} can be read: {error}")


def load(model: nn.Module, path: Path) -> None:
    """Give a model the weights of a file, also if a wrapper of torch has added to their names. Tied tensors may be
    there under one of their names.

    Raises:
        RuntimeError: they are those of another model.
    """
    with hidden(model):
        load_tensors(model, path)
    with_extra_state(model, path.parent)


def with_extra_state(model: nn.Module, folder: Path) -> nn.Module:
    """The model, with what its modules keep besides tensors, as far as `save` has written that there."""
    if (folder / EXTRA).is_file():
        give(model, torch.load(io.BytesIO(read_regular(folder / EXTRA)), map_location="cpu", weights_only=True))
    return model


def load_tensors(model: nn.Module, path: Path) -> None:
    """As `load`, of tensors alone."""
    renamed = plain_names(names_in([path]), model.state_dict())
    if not renamed and not in_one_memory([*model.parameters(), *model.buffers()]):
        load_model(model, str(path))
        return
    if renamed:
        tell(f"{path}: {taken_off(renamed)}")
    given, state = tensors_in([path], renamed), model.state_dict(keep_vars=True)
    loaded = {id(state[name]) for name in given if name in state}
    tied = {name: tensor for name, tensor in state.items() if name not in given and id(tensor) in loaded}
    model.load_state_dict({**{name: tensor.detach() for name, tensor in tied.items()}, **given})


def names_in(paths: Iterable[Path]) -> list[str]:
    """The names of all tensors in files of weights."""
    names: list[str] = []
    for path in paths:
        with safe_open(path, "pt") as file:
            names += file.keys()
    return names


def tensors_in(paths: Iterable[Path], renamed: Mapping[str, str]) -> dict[str, Tensor]:
    """All tensors in files of weights, some under other names; mapped from the disk."""
    tensors: dict[str, Tensor] = {}
    for path in paths:
        with safe_open(path, "pt") as file:
            tensors |= {renamed.get(name, name): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


def dtypes_in(files: Iterable[Path]) -> dict[str, dtype]:
    """The number format of each tensor in files of weights, by all names of the tensor."""
    formats: dict[str, dtype] = {}
    for path in files:
        with safe_open(path, "pt") as file:
            formats |= {name: file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118
            formats |= {name: formats[kept] for name, kept in (file.metadata() or {}).items() if kept in formats}
    return formats


def write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(without_secrets(values), indent=2) + "\n")


def plain(config: Any) -> dict[str, Any]:
    """A frozen dataclass as plain values for JSON, with its class under `_target_`."""
    values = {name: value.name if isinstance(value, Enum) else value for name, value in asdict(config).items()}
    return {"_target_": target_of(type(config)), **values}


def target_of(cls: type) -> str:
    """The name under which `_target_` has a class."""
    return f"{cls.__module__}.{cls.__qualname__}"
