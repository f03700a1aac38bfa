"""Hugging Face's layout of a model's folder, which `from_pretrained` can load."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from lowvram.core.quiet import quiet

BESIDE = (  # files that belong to a model, but that its `save_pretrained` doesn't write: tokenizers, image processors
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template.*",
    "preprocessor_config.json",
    "processor_config.json",
)


def save(model: Any, restored: Mapping[str, Any], source: Path, folder: Path) -> None:
    """Write a model of transformers.

    Args:
        restored: original values of configuration entries that were changed for the training.
        source: where the model came from, if that is a folder.
    """
    with quiet():
        model.save_pretrained(folder)
        config = deepcopy(model.config)
        for name, value in restored.items():
            setattr(config, name, value)
        config.save_pretrained(folder)
    for pattern in BESIDE:
        for path in filter(Path.is_file, source.glob(pattern)):
            shutil.copyfile(path, folder / path.name)
