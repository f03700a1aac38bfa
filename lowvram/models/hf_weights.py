"""Where the weights of a model of transformers come from: loads pretrained ones, and holds what the files have against
what the model has. The library itself starts whatever is missing at random."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from safetensors import SafetensorError, safe_open

from lowvram.compat.hf_offline import hf_offline
from lowvram.compat.torch_modes import without_dispatch_modes
from lowvram.compat.transformers import start_anew
from lowvram.config.errors import BadInput, require
from lowvram.config.texts import first_line
from lowvram.core.mesh import tell
from lowvram.models.hf_source import folder, is_folder, local_files, transformers
from lowvram.models.hf_ties import places_of
from lowvram.models.layout import names_in, tensors_in
from lowvram.models.wrappers import few, plain_names, taken_off

ADAPTER = "adapter_config.json"
SCALES = ("_scale", "_scale_inv")  # end names of what weights of few bits are multiplied with
INDEX = "model.safetensors.index.json"
BROKEN = (AttributeError, ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError, SafetensorError)


class Weights(Enum):
    """Where the weights come from. The names are what a user types."""

    auto = "pretrained if there are any, else random"
    pretrained = "as they were saved"
    random = "as the model's author starts them"


class Missing(Enum):
    """What becomes of weights that the pretrained files lack and that are no new head's. The names are what a user
    types."""

    refuse = "an error that names them"
    allow = "random values, as the model's author starts them"


@final
@dataclass
class Differences:
    """Between the weights in files and those of a model, by their names."""

    missing: list[str] = field(default_factory=list)  # in the files
    other_shape: dict[str, str] = field(default_factory=dict)  # with the shape there and here
    unread: list[str] = field(default_factory=list)  # in the files, and not in the model


class Place(NamedTuple):
    """Where pretrained weights are: a folder, or a name on the hub."""

    name: str
    revision: str | None

    def read(self, model_class: Any, config: Any, dtype: torch.dtype | str = "auto") -> tuple[Any, Differences]:
        """The model, on the CPU, with the weights that fit it, and where they don't.

        Args:
            dtype: of the weights; auto: as in the files.

        Raises:
            BadInput: of `model.name`: the files can't be read.
        """
        self.check_no_adapter()
        try:
            model, differences = loaded(model_class, config, *self, dtype=dtype)
            self.check_no_adapter()  # of the hub, whose files are here only now
            paths = self.files()
            if getattr(config, "quantization_config", None) is None:
                check_floats(self.name, paths, model)
            renamed = plain_names(names_in(paths), model.state_dict().keys()) if differences.unread else {}
            if renamed:
                state = tensors_in(paths, renamed)
                model, differences = loaded(model_class, config, None, None, dtype=dtype, state_dict=state)
                tell(f"model.name={self.name}: {taken_off(renamed)}")
            return model, differences
        except BROKEN as error:
            if isinstance(error, BadInput):
                raise
            allowed = f"a model whose weights fit its configuration: {first_line(error)}"
            raise BadInput("model.name", self.name, allowed) from None

    def check_no_adapter(self) -> None:
        """Raises BadInput if an adapter lies beside the weights: the library would add it to the model."""
        where = local_files(self.name, self.revision)
        allowed = f"a model without an adapter beside it ({ADAPTER}): merge the adapter into the weights, or take"
        has_adapter = where is not None and (where / ADAPTER).is_file()
        require(not has_adapter, "model.name", self.name, f"{allowed} {ADAPTER} and its weights out of the folder")

    def files(self) -> list[Path]:
        """The files of the weights on this machine: one, or those that the index names."""
        where = local_files(self.name, self.revision)
        if where is None:
            return []
        whole = where / "model.safetensors"
        return [whole] if whole.is_file() else [where / name for name in check_index(self.name, where)]


def loaded(
    model_class: Any, config: Any, name: str | None, revision: str | None, **more: Any
) -> tuple[Any, Differences]:
    is_here = name is None or is_folder(name)
    with nullcontext() if is_here else hf_offline():
        model, info = model_class.from_pretrained(
            str(folder(name)) if name is not None and is_here else name,
            config=config,
            revision=revision,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **more,
        )
    shapes = {key: f"{tuple(there)} there, {tuple(here)} here" for key, there, here in sorted(info["mismatched_keys"])}
    return model, Differences(sorted(info["missing_keys"]), shapes, sorted(info["unexpected_keys"]))


def check_floats(name: str, paths: Sequence[Path], model: Any) -> None:
    """Tell which weights are floats of 8 bits in files that don't say of a quantization.

    Raises:
        BadInput: the files have whole numbers for weights, or scales for floats of 8 bits, without saying how they were
            quantized: the library would take the numbers as they stand.
    """
    floats = [each for each, tensor in model.state_dict().items() if tensor.is_floating_point()]
    places, short = places_of(floats, paths, model), list[str]()
    for path in paths:
        with safe_open(path, "pt") as file:
            names = {*file.keys()}
            codes = {there: file.get_slice(there).get_dtype() for where, there in places.values() if where == path}
        for there, code in codes.items():
            is_short = code.startswith("F8")
            is_plain = code.startswith(("F", "BF")) and not (is_short and names & {there + end for end in SCALES})
            allowed = f"a model whose weights are floats, or whose config.json has a quantization_config: {there} is"
            require(
                is_plain, "model.name", name, f"{allowed} {code} in its files, and nothing says which numbers are meant"
            )
            short += [there] * is_short
    if short:
        tell(f"model.name={name}: floats of 8 bits in its files, without a scale, so taken as they stand: {few(short)}")


def check_index(name: str, where: Path) -> list[str]:
    """The files that an index of weights names, if there is one.

    Raises:
        BadInput: they aren't plain names of files of safetensors in that folder: the library would also read pickles.
    """
    if not (where / INDEX).is_file():
        return []
    try:
        named = sorted({*json.loads((where / INDEX).read_bytes())["weight_map"].values()})
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise BadInput("model.name", name, f"a model whose {INDEX} can be read ({first_line(error)})") from None
    for each in named:
        is_plain = isinstance(each, str) and Path(each).name == each and each.endswith(".safetensors")
        allowed = f"a model whose {INDEX} names only files of safetensors beside it: it names {each!r}"
        require(is_plain, "model.name", name, allowed)
    return named


def check_complete(name: str, differences: Differences, new: Collection[str], missing: Missing) -> None:
    """Tell what pretrained weights lack, and what of them isn't read.

    Args:
        name: of the model.
        new: the names of a new head's weights.

    Raises:
        BadInput: they lack weights, or have them in other shapes, that are no new head's.
    """
    at_random = [*differences.missing, *differences.other_shape]
    if missing is Missing.refuse and (lost := [each for each in at_random if each not in new]):
        what = described(differences, lost)
        allowed = f"a model whose weights fit its configuration: {what}; model.missing=allow starts such at random"
        raise BadInput("model.name", name, allowed)
    if at_random:
        trains = "with adapter=lora or qlora such layers train and are saved only if adapter.train names them"
        tell(f"model.name={name}: starts at random: {few(at_random)}; {trains}")
    if differences.unread:
        tell(f"model.name={name}: not in this model, so not read: {few(differences.unread)}")


def of_new_head(names: Collection[str], model: Any, config: Any) -> set[str]:
    """Those weights that a model lacks because the class that saved its weights has another head, or none: they are
    outside the base model or, as the pooler of a BERT that was saved with a head for masked words, that class has none
    of this name."""
    prefix = f"{model.base_model_prefix}."
    is_apart = any(name.startswith(prefix) for name in model.state_dict())
    saved = {name.removeprefix(prefix) for name in names_as_saved(config)}
    outside = {name for name in names if is_apart and not name.startswith(prefix)}
    return outside | {name for name in names if saved and name.removeprefix(prefix) not in saved}


@torch.no_grad()
def start_new_head(name: str, model: Any) -> None:
    """Start the layers outside of the base model at random, but for weights that they share with it, and tell which."""
    children = dict(model.named_children())
    base = children.pop(model.base_model_prefix, None)
    shared = set() if base is None else {*base.parameters()}
    heads = {
        key: child for key, child in children.items() if base is not None and shared.isdisjoint(child.parameters())
    }
    for head in heads.values():
        start_anew(model, head)
    new = [f"{key}.{inner}" for key, head in heads.items() for inner, _ in head.named_parameters()]
    what = few(new) if new else "nothing: no layer of the model is known to be a head of its own"
    tell(f"model.name={name}: model.reset_head starts at random: {what}")


def names_as_saved(config: Any) -> list[str]:
    """The names of the weights of the class that a configuration names; empty if transformers has no such class."""
    saved_by = getattr(transformers, (config.architectures or [""])[0], None)
    if not (isinstance(saved_by, type) and issubclass(saved_by, transformers.PreTrainedModel)):
        return []
    with without_dispatch_modes(), torch.device("meta"):
        return [*saved_by(config).state_dict()]


def described(differences: Differences, names: Collection[str]) -> str:
    """Which of these weights are missing in the files, and which have another shape there."""
    absent = [name for name in names if name not in differences.other_shape]
    others = [f"{name}: {differences.other_shape[name]}" for name in names if name in differences.other_shape]
    lists = [f"{few(absent)} not in its files"] * bool(absent) + [f"of another shape {few(others)}"] * bool(others)
    return "; ".join(lists)
