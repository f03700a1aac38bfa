"""Which overrides name code that a run imports and calls. Imports no torch.

A folder that somebody else has made may hold such overrides. They aren't followed before the user has confirmed them:
runs/own_runs.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from lowvram.config.defaults import CONF
from lowvram.config.plugins import own_groups
from lowvram.config.secret import REFUSED

# The fields whose values are imported; config/importing.py takes no others.
IMPORTED = ("callbacks", "eval.metrics", "model.target", "data.target", "task.target", "optimizer.target")
PRESETS = ("experiment", "sweep", "debug", "local")  # groups whose options are whole configurations
USUAL_KEY = re.compile(r"[\w./@-]+")
Names = Mapping[str, Sequence[str]]  # what would be imported, by key


def code_in(words: Sequence[str]) -> Names:
    """What overrides name as code, by their keys. A setting of Hydra itself counts (it may name classes and files), and
    so does an option by a path, which may lead to anybody's YAML.

    Raises:
        HydraException: a word that can't be read.
    """
    found = dict[str, list[str]]()
    readable = [word.replace(REFUSED, "refused") for word in words]  # Hydra can't read what stands for a secret
    for override in OverridesParser.create().parse_overrides(readable):
        if override.is_delete():
            continue
        for key, name in names_in(override):
            found.setdefault(key, []).append(name)
    return found


def names_in(override: Override) -> Iterator[tuple[str, str]]:
    """The keys and names of one override."""
    key, value = override.key_or_group, override.value()
    whole = str(override.input_line).partition("=")[2]
    is_hydras = re.split(r"[./]", key)[0] == "hydra" or str(override.package or "").startswith("hydra")
    if is_hydras or not USUAL_KEY.fullmatch(key) or override.is_sweep_override():
        yield key, whole
    elif "." not in key and is_group(key):
        yield from ((key, option) for option in texts_in(value) if is_path(option))
    else:
        yield from names_at(key, value)


def is_group(key: str) -> bool:
    return key in PRESETS or key in own_groups() or (CONF / key).is_dir()


def is_path(option: str) -> bool:
    """Whether an option is looked for outside of its group."""
    return option.startswith(("/", "~")) or ".." in option.split("/") or ":" in option


def names_at(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """The names in a value and, if it is a dictionary, in what it holds."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from names_at(f"{key}.{name}", item)
    elif key in IMPORTED or "_target_" in key.split("."):
        yield from ((key, text) for text in texts_in(value))
    elif isinstance(value, str) and "${" in value and any(name.startswith(f"{key}.") for name in IMPORTED):
        yield key, value  # stands for a whole section


def code_of(config: Mapping[str, Any]) -> Names:
    """What a composed configuration, in plain values, names as code."""
    found = dict[str, list[str]]()
    for key in IMPORTED:
        group, _, field = key.partition(".")
        value = config.get(group)
        value = value.get(field) if field and isinstance(value, Mapping) else None if field else value
        if names := list(texts_in(value)):
            found[key] = names
    return found


def texts_in(value: Any) -> Iterator[str]:
    """The texts in a value or a list of values. Null and empty ones name nothing."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from texts_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from texts_in(item)
    elif value not in (None, ""):
        yield str(value)
