"""Hugging Face's layout of a model's folder, which `from_pretrained` can load."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from lowvram.core.quiet import quiet
from lowvram.models.hf_source import transformers

BESIDE = (  # files that can't be made from the model itself: tokenizers, image processors, settings of `generate`
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template.*",
    "preprocessor_config.json",
    "processor_config.json",
    "generation_config.json",
)


def save(model: Any, entries: Mapping[str, Any], folder: Path) -> None:
    """Write a model of transformers.

    Args:
        entries: of its configuration, that are saved with other values than it was trained with.
    """
    with quiet():
        model.save_pretrained(folder)
        config = deepcopy(model.config)
        for name, value in entries.items():
            setattr(config, name, value)
        config.save_pretrained(folder)
        if model.can_generate():
            transformers.GenerationConfig.from_model_config(config).save_pretrained(folder)


def weight_files(folder: Path) -> list[Path]:
    """The weights in a folder: one file, or several shards."""
    whole = folder / "model.safetensors"
    return [whole] if whole.is_file() else sorted(folder.glob("model-*-of-*.safetensors"))


def copy_companions(source: Path | None, folder: Path) -> None:
    """Copy the files of `BESIDE` from the folder that the model came from, if there is one."""
    for pattern in BESIDE:
        for path in filter(Path.is_file, source.glob(pattern) if source else ()):
            shutil.copyfile(path, folder / path.name)
