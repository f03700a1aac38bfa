"""Weights that a configuration of transformers ties to one tensor, and whose files hold a tensor of its own for each:
the head of a Flan-T5, say, or one that was trained apart from the embedding. The library then doesn't tie them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from lowvram.compat.torch_modes import without_dispatch_modes
from lowvram.config.errors import BadInput
from lowvram.core.mesh import tell
from lowvram.models.hf_source import is_folder
from lowvram.models.layout import UNREADABLE
from lowvram.models.third_party import names_of_tensors
from lowvram.models.wrappers import few, plain_names

NUM_ROWS = 4096  # compared at once


FOUND: dict[str, tuple[str, ...]] = {}  # by files, class and configuration


def names_apart(files: Sequence[Path], model_class: Any, config: Any) -> tuple[str, ...]:
    """Those names of tied parameters under which files of weights hold other values than under the first name that
    they have of the same parameter. Files are read once; of those that can't be read there are none.
    """
    key = repr((files, model_class, config.to_json_string()))
    if key not in FOUND:
        with suppress(*UNREADABLE):  # whoever then reads the weights says so
            FOUND[key] = tuple(find_names_apart(files, model_class, config)) if files else ()
    return FOUND.get(key, ())


def find_names_apart(files: Sequence[Path], model_class: Any, config: Any) -> list[str]:
    """`names_apart`, uncached."""
    with without_dispatch_modes(), torch.device("meta"):
        model = model_class(config)
    tied = [names for names in names_of_tensors(model) if len(names) > 1]
    places = places_of([name for names in tied for name in names], files, model) if tied else {}
    apart: list[str] = []
    for names in tied:
        saved = [name for name in names if name in places]
        apart += [name for name in saved[1:] if is_other(places[name], places[saved[0]])]
    return apart


def places_of(wanted: Sequence[str], files: Sequence[Path], model: Any) -> dict[str, tuple[Path, str]]:
    """The file of each of a model's names that files of weights hold, and its name there: with or without the prefix of
    the base model, and without what wrappers of torch have added."""
    there: dict[str, tuple[Path, str]] = {}
    for path in files:
        with safe_open(path, "pt") as file:
            there |= {name: (path, name) for name in file.keys()}  # noqa: SIM118  # it is no dictionary
    there |= {bare: there[name] for name, bare in plain_names(there, wanted).items()}
    prefix = f"{model.base_model_prefix}."
    spellings = ((name, (name, prefix + name, name.removeprefix(prefix))) for name in wanted)
    found = {name: next((each for each in spelt if each in there), None) for name, spelt in spellings}
    return {name: there[spelling] for name, spelling in found.items() if spelling is not None}


def is_other(first: tuple[Path, str], second: tuple[Path, str]) -> bool:
    """Whether two tensors in files, of equal shape, differ. They are read in parts, up to the first that does."""
    with (
        without_dispatch_modes(),
        torch.device("cpu"),
        safe_open(first[0], "pt") as file,
        safe_open(second[0], "pt") as other_file,
    ):
        slices = file.get_slice(first[1]), other_file.get_slice(second[1])
        shape, other_shape = (each.get_shape() for each in slices)
        if shape != other_shape or not shape:
            return False
        starts = range(0, shape[0], NUM_ROWS)
        parts = ([each[start : start + NUM_ROWS].float() for each in slices] for start in starts)
        return any(not torch.equal(*each) for each in parts)


def part(model: nn.Module, names: Sequence[str]) -> None:
    """Give each of these tied names a tensor of its own, without values."""
    for name in names:
        inside, _, last = name.rpartition(".")
        module = model.get_submodule(inside)
        tied: Any = getattr(module, last)
        own = torch.empty_like(tied)
        setattr(module, last, nn.Parameter(own, tied.requires_grad) if isinstance(tied, nn.Parameter) else own)


def tell_apart(name: str, names: Sequence[str]) -> None:
    """Tell which weights of a model stay apart."""
    if names:
        what = "trained and saved apart from what the configuration ties them to"
        tell(f"model.name={name}: with values of their own in its files, so {what}: {few(names)}")


def refusal(name: str, first: str, other: str) -> BadInput:
    """Of a model whose files hold other values for two tied names, where `names_apart` hasn't found so: files of the
    hub before they are here, or names that the library reads in a way that isn't known here."""
    allowed = f"a model whose files hold the same for {first} and {other}, which its configuration ties"
    remedy = "save it with tie_word_embeddings=false in its config.json"
    if not is_folder(name):
        remedy = f"its files are on this machine now: give the same command again, and if it ends like this, {remedy}"
    return BadInput("model.name", name, f"{allowed}: {remedy}")


def says_apart(model: Any, config: Any) -> bool:
    """Whether tie_word_embeddings=false would say of a configuration which of its model's parameters are tied. It
    doesn't of a T5, which ties its embeddings whatever its configuration says."""
    values = {**config.to_dict(), "tie_word_embeddings": False}
    try:
        with without_dispatch_modes(), torch.device("meta"):
            other = type(model)(type(config).from_dict(values))
    except Exception:  # a class raises what it likes for a configuration that it doesn't take
        return False
    return sorted(names_of_tensors(other)) == sorted(names_of_tensors(model))
