"""`model/` in a run's folder: what was trained, and what it takes to build the plain model."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from omegaconf import DictConfig
from safetensors.torch import load_model
from torch import nn

from lowvram.config.errors import BadInput, require
from lowvram.config.schema import build
from lowvram.config.secret import REFUSED
from lowvram.core.assemble import assemble
from lowvram.data.spec import DataSpec, Modality, layout_from
from lowvram.knobs.adapter.parts import Adapter
from lowvram.models.external import ExternalConfig, HandedOver
from lowvram.models.layout import CONFIG, WEIGHTS, plain, write_json
from lowvram.results.files import manifest
from lowvram.results.files.durable import unfinished_folder
from lowvram.tasks import Auto, ModelConfig

APART = "lowvram.json"  # beside an adapter: what it is to be put into
USUAL = (CONFIG, WEIGHTS, APART, "adapter_config.json", "adapter_model.safetensors")
CLASSES = {  # that an exported folder may name
    "model": (
        "lowvram.models.transformer.TransformerConfig",
        "lowvram.models.resnet.ResNetConfig",
        "lowvram.models.hf.HfConfig",
        "lowvram.models.external.ExternalConfig",
    ),
    "adapter": tuple(
        f"lowvram.knobs.adapter.{name}" for name in ("freeze.NoAdapter", "freeze.Freeze", "lora.Lora", "lora.QLora")
    ),
}


class Origin(NamedTuple):
    """What a model was made from."""

    config: ModelConfig
    spec: DataSpec
    adapter: Adapter
    seed: int


def export(folder: Path, model: nn.Module, origin: Origin, merge: bool) -> None:
    """Write a whole model, or what an adapter has learnt alone, in place of what an earlier call has written there.

    Args:
        merge: write a whole model in any case.

    Raises:
        FileExistsError: a file of somebody else is in the way; nothing was changed.
    """
    with unfinished_folder(folder) as fresh:
        write(fresh, model, origin, merge)
        manifest.put(fresh, folder)


def write(folder: Path, model: nn.Module, origin: Origin, merge: bool) -> None:
    config, spec, adapter, seed = origin
    if merge or not adapter.save_apart(model, folder, config.base):
        config.save(adapter.merged(model, partial(config.make, spec)), spec, folder)
        return
    named = {} if config.base is None else {"name": config.base}
    described = {"model": {**plain(config), **named}, "data": plain(spec), "adapter": plain(adapter), "seed": seed}
    write_json(folder / APART, described)


def check_free(folder: Path) -> None:
    """Raises FileExistsError if a file of somebody else will be in the way of an export."""
    manifest.ours_in(folder, USUAL)


def load(folder: str | Path, *, model: Callable[..., Any] | None = None, trust: Collection[str] = ()) -> Any:
    """The plain model of a run's `model` folder with its trained weights, on the CPU: no knob, no framework. What was
    trained apart is merged into what it was trained beside. No code runs but that of lowvram and of transformers, and
    what the caller names.

    Args:
        model: the class or function that has made the model, where it is the user's own (model=external).
        trust: dotted names of such classes or functions; the module of the one that the folder names is imported.

    Raises:
        BadInput: the folder is damaged, or names code that the caller didn't.
    """
    folder = Path(folder)
    manifest.check(folder)
    allowed = Allowed(model, frozenset([trust] if isinstance(trust, str) else trust))
    if (folder / APART).is_file():
        return with_adapter(folder, allowed)
    described = read_json(folder, CONFIG)
    if "data" not in described:
        allowed.check_unused()
        return from_transformers(folder, described)
    config, spec = described_problem(described, allowed)
    found = (config.build if isinstance(config, ExternalConfig) else config.make)(spec)
    load_model(found, str(folder / WEIGHTS))
    return found


@final
@dataclass(frozen=True)
class Allowed:
    """Whose code may run."""

    maker: Callable[..., Any] | None
    names: Collection[str]

    def config(self, config: ModelConfig) -> ModelConfig:
        """The same, if its model may be made.

        Raises:
            BadInput: it needs code that the caller hasn't named.
        """
        if not isinstance(config, ExternalConfig):
            self.check_unused()
            return config
        name = config.target.rpartition(".")[2]
        args = {arg: value for arg, value in (config.args or {}).items() if REFUSED not in str(value)}
        if self.maker is not None:
            return HandedOver(**vars(replace(config, args=args)), maker=self.maker)
        secrets = [arg for arg in config.args or {} if arg not in args]
        whole = f"load(folder, model=functools.partial({name}, {', '.join(f'{arg}=…' for arg in secrets)}))"
        allowed = f"handed over, since it held secrets, which are kept nowhere: {whole}"
        require(not secrets, "model.args", config.args, allowed)
        ways = f"load(folder, model={name}), or load(folder, trust={{{config.target!r}}})"
        is_trusted = config.target in self.names
        require(is_trusted, "model.target", config.target, f"named by you, since its code will run: {ways}")
        return config

    def check_unused(self) -> None:
        """Raises BadInput if the caller has handed over what isn't needed."""
        require(self.maker is None, "model", self.maker, "left out: this model isn't made by code of your own")


def with_adapter(folder: Path, allowed: Allowed) -> nn.Module:
    """The model that was adapted, made again, and what it has learnt."""
    described = read_json(folder, APART)
    adapter = built(described, "adapter")
    task = Auto().pose(*described_problem(described, allowed))
    model = assemble(task, {"adapter": adapter}, torch.device("cpu"), described["seed"]).model
    adapter.read_apart(model, folder)
    return adapter.merged(model, task.make_model)


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """What a file of an export says. Raises BadInput if it isn't there or isn't JSON, or asks to be filled in."""
    try:
        described = json.loads((folder / name).read_bytes())
    except (OSError, ValueError) as error:
        raise BadInput("folder", str(folder), f"an exported model, whose {name} can be read ({error})") from None
    is_plain = isinstance(described, dict) and "${" not in json.dumps(described)  # OmegaConf would work that out
    require(is_plain, "folder", str(folder), f"an exported model: its {name} isn't one's")
    return described


def described_problem(described: dict[str, Any], allowed: Allowed) -> tuple[ModelConfig, DataSpec]:
    data = described["data"]
    layout = data.get("layout") and layout_from(data["layout"])
    shape, vocab_size = tuple(data["shape"]), data.get("vocab_size")
    spec = DataSpec(Modality[data["modality"]], data["num_classes"], shape, vocab_size, layout)
    return allowed.config(built(described, "model")), spec


def built(described: dict[str, Any], part: str) -> Any:
    """One of our own objects. Raises BadInput for any other."""
    named = described[part].get("_target_")
    require(named in CLASSES[part], f"{part}._target_", named, f"one of {', '.join(CLASSES[part])}")
    return build(DictConfig(described[part]), part)


def from_transformers(folder: Path, described: dict[str, Any]) -> nn.Module:
    """One of the library's models, by the name of its class. Raises BadInput for all else that the library has."""
    from lowvram.models.hf_source import check_brings_no_code, transformers

    check_brings_no_code(str(folder), described)
    name = (described.get("architectures") or [None])[0]
    found: Any = getattr(transformers, str(name), None)
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    require(is_model, "architectures", name, "the name of a model's class in transformers")
    return found.from_pretrained(folder, use_safetensors=True, trust_remote_code=False)
