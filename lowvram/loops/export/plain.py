"""The trained weights as safetensors, and the configuration from which `load` builds the plain model."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from omegaconf import DictConfig
from torch import nn

from lowvram.config.errors import BadInput, require
from lowvram.config.registry import node_of, options_of
from lowvram.config.schema import build, find_target
from lowvram.config.secret import REFUSED
from lowvram.config.texts import first_line
from lowvram.core.assemble import assemble
from lowvram.data.spec import DataSpec, Modality, layout_from
from lowvram.knobs.adapter.parts import Adapter
from lowvram.models import layout
from lowvram.models.external import ExternalConfig, HandedOver
from lowvram.models.layout import CONFIG, WEIGHTS, plain, target_of, write_json
from lowvram.results.files.plausible import check_counts
from lowvram.results.files.regular import LONG_BYTES, read_regular
from lowvram.tasks import Auto, ModelConfig

APART = "lowvram.json"  # beside an adapter's files: describes the model that it belongs to


class Origin(NamedTuple):
    """What a model was made from."""

    config: ModelConfig
    spec: DataSpec
    adapter: Adapter
    seed: int


def write(folder: Path, model: nn.Module, origin: Origin, merge: bool) -> None:
    config, spec, adapter, seed = origin
    if merge or not adapter.save_adapter(model, folder, config.base):
        config.save(adapter.merged(model, partial(config.make, spec)), spec, folder)
        return
    config.save_companions(folder)
    named = {} if config.base is None else {"name": config.base}
    described = {"model": {**plain(config), **named}, "data": plain(spec), "adapter": plain(adapter), "seed": seed}
    write_json(folder / APART, described)


def load(folder: Path, allowed: Allowed) -> nn.Module:
    """The plain model with its trained weights; an adapter is merged into it."""
    if (folder / APART).is_file():
        return with_adapter(folder, allowed)
    described = read_json(folder, CONFIG)
    if "data" not in described:
        allowed.check_unused()
        return from_transformers(folder, described)
    return with_weights(folder, *described_problem(described, allowed))


def again(folder: Path, origin: Origin) -> nn.Module:
    """What `write` has just written there, as `load` would return it, in the process that trained it."""
    described = read_json(folder, CONFIG)
    if "data" not in described:
        return from_transformers(folder, described)
    return with_weights(folder, origin.config, origin.spec)


def with_weights(folder: Path, config: ModelConfig, spec: DataSpec) -> nn.Module:
    made = made_from(config, spec)
    layout.load(made, folder / WEIGHTS)
    return made


def made_from(config: ModelConfig, spec: DataSpec) -> nn.Module:
    """The plain model, on the CPU; its tensors hold any values."""
    return (config.build if isinstance(config, ExternalConfig) else config.make)(spec)


def skeleton(folder: Path, allowed: Allowed) -> nn.Module:
    """The plain model of an export without such weights, on the CPU; its tensors hold any values."""
    described = read_json(folder, CONFIG)
    if "data" in described:
        return layout.with_extra_state(made_from(*described_problem(described, allowed)), folder)
    allowed.check_unused()
    model_class = class_in_transformers(folder, described)
    return model_class(model_class.config_class.from_pretrained(folder, trust_remote_code=False))


@final
@dataclass(frozen=True)
class Allowed:
    """The code outside lowvram and transformers that `load` may run."""

    maker: Callable[..., Any] | None  # the argument `model` of `load`
    names: Collection[str]  # the argument `trust`

    def config(self, config: ModelConfig) -> ModelConfig:
        """The same configuration, if its model's code may run.

        Raises:
            BadInput: the caller hasn't named that code, or its arguments were secrets, which an export leaves out.
        """
        if not isinstance(config, ExternalConfig):
            self.check_unused()
            return config
        name = config.target.rpartition(".")[2]
        args = {arg: value for arg, value in (config.args or {}).items() if REFUSED not in str(value)}
        if self.maker is not None:
            return HandedOver(**vars(replace(config, args=args)), maker=self.maker)
        secrets = [arg for arg in config.args or {} if arg not in args]
        call = f"load(folder, model=functools.partial({name}, {', '.join(f'{arg}=…' for arg in secrets)}))"
        allowed = f"passed again, since secrets aren't saved with a model: {call}"
        require(not secrets, "model.args", config.args, allowed)
        ways = f"load(folder, model={name}), or load(folder, trust={{{config.target!r}}})"
        is_trusted = config.target in self.names
        require(is_trusted, "model.target", config.target, f"named by you, since loading runs its code: {ways}")
        return config

    def check_unused(self) -> None:
        """Raises BadInput if the caller has passed a class or function that isn't needed."""
        require(self.maker is None, "model", self.maker, "left out: this model isn't made by code of your own")


def with_adapter(folder: Path, allowed: Allowed) -> nn.Module:
    """The adapted model, made again, with the adapter's trained weights merged in."""
    described = read_json(folder, APART)
    adapter = built(described, "adapter")
    task = Auto().pose(*described_problem(described, allowed))
    model = assemble(task, {"adapter": adapter}, torch.device("cpu"), described["seed"]).model
    adapter.load_adapter(model, folder)
    return adapter.merged(model, task.make_model)


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The contents of a file of an export. Raises BadInput if it is missing, isn't JSON, or has OmegaConf
    interpolations."""
    try:
        described = json.loads(read_regular(folder / name, LONG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput("folder", str(folder), f"an exported model, whose {name} can be read ({error})") from None
    is_plain = isinstance(described, dict) and "${" not in json.dumps(described)  # OmegaConf would resolve that
    require(is_plain, "folder", str(folder), f"an exported model: its {name} isn't one's")
    check_counts(described, folder, "folder")
    return described


def described_problem(described: dict[str, Any], allowed: Allowed) -> tuple[ModelConfig, DataSpec]:
    try:
        spec = described_data(described["data"])
    except BadInput:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"the data as an export describes them ({type(error).__name__}: {first_line(error)})"
        raise BadInput("data", described.get("data"), what) from None
    return allowed.config(built(described, "model")), spec


def described_data(data: dict[str, Any]) -> DataSpec:
    layout = data.get("layout") and layout_from(data["layout"])
    shape, vocab_size = tuple(data["shape"]), data.get("vocab_size")
    names = data.get("class_names") and tuple(data["class_names"])
    return DataSpec(Modality[data["modality"]], data["num_classes"], shape, vocab_size, layout, class_names=names)


def built(described: dict[str, Any], part: str) -> Any:
    """The configuration of a model or an adapter. Raises BadInput for a class that is no option's."""
    is_node = isinstance(described.get(part), dict)
    require(is_node, part, described.get(part), "the configuration of an option, as an export describes it")
    options = options_of(part)
    targets = {str(node_of(part, option)["_target_"]) for option in options}
    named = described[part].get("_target_")
    alike = [target for target in targets if target.rpartition(".")[2] == str(named).rpartition(".")[2]]
    is_offered = named in [target_of(find_target(part, target)) for target in alike]  # the others aren't imported
    require(is_offered, f"{part}._target_", named, f"the class of an option: {', '.join(options)}")
    return build(DictConfig(described[part]), part)


def from_transformers(folder: Path, described: dict[str, Any]) -> nn.Module:
    """A model of transformers, by the name of its class. Raises BadInput if transformers has no such model, or the
    folder lacks weights of it."""
    from lowvram.models import hf_weights

    model_class = class_in_transformers(folder, described)
    config = model_class.config_class.from_pretrained(folder, trust_remote_code=False)
    model, differences = hf_weights.Place(str(folder), None).read(model_class, config)
    lost = [*differences.missing, *differences.other_shape]
    what = hf_weights.described(differences, lost)
    require(not lost, "folder", str(folder), f"a model with all of its weights: {what}")
    return model


def class_in_transformers(folder: Path, described: dict[str, Any]) -> Any:
    from lowvram.models.hf_source import check_brings_no_code, transformers

    check_brings_no_code(str(folder), described)
    name = (described.get("architectures") or [None])[0]
    model_class: Any = getattr(transformers, str(name), None)
    is_model = isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)
    require(is_model, "architectures", name, "the name of a model's class in transformers")
    return model_class
