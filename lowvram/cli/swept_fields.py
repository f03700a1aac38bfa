"""Fields of a group whose option only the points of a sweep choose, as in `adapter=lora,qlora adapter.rank=8`.

Hydra sets typed words in the default option of each group first, which may lack the field: adapter=none has no rank.
Such a word becomes a swept value, of which there is one: it is then set in the points alone. Imports no torch.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf

from lowvram.config.code_names import PRESETS
from lowvram.config.defaults import CONF
from lowvram.config.words import key as key_of

SWEEPER = "hydra.sweeper"
SWEEP_FLAGS, FOLDER_FLAGS = ("-m", "--multirun"), ("-cd", "--config-dir")


def with_fields_of_swept(words: Sequence[str]) -> list[str]:
    """The words; in a sweep over a group's options, with the group's fields as swept values, of which there is one. The
    options may be typed, or stand in `hydra.sweeper.points` or `hydra.sweeper.params`, typed or of a preset."""
    parsed = {word: parsed_word(word) for word in words}
    presets = list(presets_in(words, parsed.values()))
    is_sweep = any(OmegaConf.select(preset, "hydra.mode") == "MULTIRUN" for preset in presets)
    if not is_sweep and not {*SWEEP_FLAGS} & {*words}:
        return list(words)
    swept = {each.key_or_group for each in parsed.values() if each is not None and each.is_discrete_sweep()}
    for about in (*map(sweeper_of, presets), typed_sweeper(parsed.values())):
        swept |= groups_in(about)
    found = list[str]()
    for word in words:
        override, (key, _, value) = parsed[word], word.partition("=")
        is_fixed = override is not None and not override.is_sweep_override() and not override.is_add()
        is_field = "." in key and key.partition(".")[0] in swept
        found.append(f"{key}=choice({value})" if is_fixed and is_field else word)
    return found


def parsed_word(word: str) -> Override | None:
    """The word as Hydra reads it; None for a flag, or if it can't be read."""
    try:
        return None if word.startswith("-") else OverridesParser.create().parse_override(word)
    except HydraException:
        return None


def presets_in(words: Sequence[str], parsed: Collection[Override | None]) -> Iterator[Any]:
    """The YAML files of whole configurations that are typed, such as `sweep=NAME`. One that isn't there or can't be
    read is left to Hydra to refuse."""
    folders = [*folders_in(words), CONF]
    for override in parsed:
        if override is not None and override.key_or_group in PRESETS:
            paths = [folder / override.key_or_group / f"{override.value()}.yaml" for folder in folders]
            with suppress(Exception):  # of any class, as YAML's reader has many
                yield OmegaConf.load(next(path for path in paths if path.is_file()))


def folders_in(words: Sequence[str]) -> Iterator[Path]:
    """The folders of the user's own configurations: `--config-dir FOLDER`, `--config-dir=FOLDER`."""
    for word, following in pairwise([*words, ""]):
        flag, equals, value = word.partition("=")
        if flag in FOLDER_FLAGS:
            yield Path(value if equals else following)


def sweeper_of(preset: Any) -> Mapping[str, Any]:
    """A preset's points and params."""
    return {name: OmegaConf.select(preset, f"{SWEEPER}.{name}") for name in ("points", "params")}


def typed_sweeper(parsed: Collection[Override | None]) -> Mapping[str, Any]:
    """The points and params that are typed: as a dictionary each, or one by one."""
    about: dict[str, dict[str, Any]] = {"points": {}, "params": {}}
    for override in parsed:
        key = "" if override is None or override.is_delete() else override.key_or_group.removeprefix(f"{SWEEPER}.")
        kind, _, name = key.partition(".")
        if override is not None and kind in about and key != override.key_or_group:
            value = override.value()
            about[kind] |= {name: value} if name else value if isinstance(value, dict) else {}
    return about


def groups_in(about: Mapping[str, Any]) -> set[str]:
    """The groups whose options points and params choose."""
    points, params = about["points"], about["params"]
    keys = {str(key) for key in params} if isinstance(params, Mapping) else set[str]()
    for text in points.values() if isinstance(points, Mapping) else ():
        with suppress(ValueError):  # a quotation mark without end, which is refused later
            keys |= {key_of(word) for word in shlex.split(str(text))}
    return {key for key in keys if "." not in key}
