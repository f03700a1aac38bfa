"""Hugging Face's layout: what transformers saves, and finds again with `from_pretrained`."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from lowvram.core.quiet import quiet

BESIDE = (  # what a folder holds that belongs to the model and isn't its own: tokenizers, how images are prepared
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
        restored: values of its configuration that were others for the training.
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
