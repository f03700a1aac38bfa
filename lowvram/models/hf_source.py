"""Reads models of Hugging Face's transformers from a local folder or the hub. Imports the library."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

from lowvram.compat.hf_offline import hf_offline
from lowvram.config.errors import BadInput, require
from lowvram.config.texts import first_line
from lowvram.core.quiet import quiet
from lowvram.data.local import looks_local

try:
    with quiet():  # transformers imports torchao, which logs
        import transformers
        import transformers.modeling_utils
        from huggingface_hub import try_to_load_from_cache
except ModuleNotFoundError as missing:
    needed = f"another model, or {missing.name} installed: pip install 'lowvram[hf]'"
    raise BadInput("model", "hf", needed) from None

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@lru_cache(maxsize=16)
def read_config(name: str, revision: str | None) -> Any:
    """The configuration of a local folder or, if there is none of this name, of a model on the hub.

    Raises:
        BadInput: there is neither, or it can't be read, or it asks for code that isn't transformers' own.
    """
    if is_folder(name):
        where = "a folder with a model of transformers"
        require((folder(name) / "config.json").is_file(), "model.name", name, f"{where}: it has no config.json")
    elif looks_local(name):
        raise BadInput("model.name", name, "a folder that exists, or the name of a model on the hub")
    where = str(folder(name)) if is_folder(name) else name
    try:
        with nullcontext() if is_folder(name) else hf_offline():
            values, _ = transformers.PreTrainedConfig.get_config_dict(where, revision=revision)
            check_brings_no_code(name, values)
            return transformers.AutoConfig.from_pretrained(where, revision=revision, trust_remote_code=False)
    except BadInput:
        raise
    except Exception as error:
        allowed = "a model that transformers knows" if is_folder(name) else ON_THE_HUB
        raise BadInput("model.name", name, f"{allowed}: {first_line(error)}") from None


def check_brings_no_code(name: str, values: Mapping[str, Any]) -> None:
    """Raises BadInput if a config.json asks for code that isn't transformers' own."""
    for key in code_in(values):
        allowed = (
            f"a model whose code is part of transformers: this one brings its own ({key} in its config.json), which"
        )
        remedy = f"lowvram never runs; if transformers has the same model, remove {key} in a copy of the folder"
        raise BadInput("model.name", name, f"{allowed} {remedy}")


def code_in(values: Mapping[str, Any]) -> Iterator[str]:
    """The keys that name code: files beside config.json, or kernels of the hub."""
    for key, value in values.items():
        if (key == "auto_map" and value) or ("_implementation" in key and "/" in json.dumps(value)):
            yield key
        elif isinstance(value, Mapping):
            yield from code_in(value)


ON_THE_HUB = (
    "the folder of a model, or the name of one on the hub that can be reached and read from here (for a gated one log"
    " in with `hf auth login`); a download with `hf download NAME --local-dir FOLDER` elsewhere makes such a folder"
)


def folder(name: str) -> Path:
    return Path(name).expanduser()


def is_folder(name: str) -> bool:
    return folder(name).is_dir()


def local_files(name: str, revision: str | None) -> Path | None:
    """The folder that holds a model's files on this machine; None if there is none. Of a model on the hub it holds what
    has been downloaded."""
    if is_folder(name):
        return folder(name)
    config = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(config).parent if isinstance(config, str) else None


PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
OTHER_FORMATS = PICKLES | {".h5", ".msgpack", ".gguf"}
OF_TRAINERS = ("training_args", "optimizer", "scheduler", "scaler", "rng_state")  # begin names of files without weights
READ_METHODS = frozenset({"fp8"})  # of quantization, whose weights are read as 32-bit floats


def weight_files(name: str) -> list[Path]:
    return sorted(folder(name).glob("*.safetensors"))


def other_weights(name: str) -> list[str]:
    """The files of a folder that seem to hold weights in another format, those of whole models first."""
    found = [path.name for path in folder(name).iterdir() if path.suffix in OTHER_FORMATS]
    named = [each for each in found if not each.startswith(OF_TRAINERS)]
    return sorted(named, key=lambda each: ("model" not in each, each))


def check_weights(name: str) -> None:
    """Raises BadInput unless a folder has weights that are safe to read."""
    if weight_files(name):
        return
    allowed = "a folder with *.safetensors"
    if others := other_weights(name):
        is_pickle = Path(others[0]).suffix in PICKLES
        why = "is a pickle, which can run code when it is read" if is_pickle else "is in a format that isn't read here"
        allowed += f": {others[0]} {why}: save the model anew as safetensors"
    raise BadInput("model.name", name, f"{allowed}; model.weights=random starts without any")


def check_quantization(name: str, about: Mapping[str, Any] | None) -> None:
    """Raises BadInput if weights were saved in a format of few bits, in which they can't be trained, and which isn't
    read here; `about` is the `quantization_config` of their configuration."""
    method = str((about or {}).get("quant_method", "bitsandbytes"))
    allowed = (
        f"a model whose weights aren't quantized: these are, with {method} (quantization_config in its config.json):"
        " take the model that they were made from; adapter=qlora itself keeps frozen weights in 4 bits"
    )
    require(not about or method in READ_METHODS, "model.name", name, allowed)
