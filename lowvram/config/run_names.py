"""What a run and a sweep are called where they are logged, for people to recognise them. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lowvram.config.defaults import CONF, default_options
from lowvram.config.identity import NOT_IDENTITY
from lowvram.config.secret import text_without_secrets, words_without_secrets
from lowvram.config.settings import ROOT_KEYS
from lowvram.config.words import key as key_of

BASELINE = "baseline"  # the name of a run that changes nothing
LONGEST, LONGEST_VALUE = 100, 30  # characters
NAMES = {"name", "path", "target"}  # keys whose values need no word before them
NUM_AXES = 4  # that a group names
# Keys that say where, how long or how often something runs, not what is trained.
UNNAMED = {*NOT_IDENTITY, "mode", "device", "process", "vram"}
UNNAMED |= {"train.eval_every", "train.log_every", "data.eval_samples"}
UNNAMED |= {"measure", "plan", "search", "snapshot", "export", "eval", "debug", "hydra"}


def run_name(words: Sequence[str], swept: Collection[str] = ()) -> str:
    """What a run changes against the defaults, such as "bf16-every2-lr0.01". With `name=thesis`, that name and what is
    swept.

    Args:
        words: the overrides, as typed.
        swept: the keys that differ between the points of the run's sweep.
    """
    values = {key_of(word): word.partition("=")[2] for word in words_without_secrets(words) if word[:1] != "~"}
    given = values.pop("name", "null")
    if given != "null":
        values = {key: value for key, value in values.items() if key in swept}
    told = {key for key in values if f"{key}.target" in values and key not in swept}
    named = [key for key, value in values.items() if key not in told and _is_named(key, value, swept)]
    parts = [_text(key, values[key]) for key in sorted(named, key=lambda key: key not in default_options())]
    return _cut("-".join([*([given] if given != "null" else []), *parts]), LONGEST) or BASELINE


def sweep_group(folder: Path, axes: Sequence[str]) -> str:
    """The group of a sweep's runs: when it began and what it varies, such as "2026-11-25 13:09 precision×ckpt"; the
    name of the sweep's folder, if the user has chosen it."""
    time = re.match(r"(\d\d)-(\d\d)-\d\d-[0-9a-f]{4}", folder.name)
    if time is None or not re.fullmatch(r"\d{4}-\d\d-\d\d", folder.parent.name):
        return _cut(text_without_secrets(folder.name), LONGEST)
    named = [axis.rpartition(".")[2] for axis in axes[:NUM_AXES]] + ["…"] * (len(axes) > NUM_AXES)
    return f"{folder.parent.name} {time[1]}:{time[2]} {'×'.join(named)}".rstrip()


def _is_named(key: str, value: str, swept: Collection[str]) -> bool:
    if key in swept:
        return True
    if key in default_options():
        return key not in UNNAMED and value != default_options()[key]
    return UNNAMED.isdisjoint({key, key.partition(".")[0]}) and value != _default(key)


def _default(key: str) -> str | None:
    """The value in conf/config.yaml of a key that belongs to no group, as it is typed."""
    value = OmegaConf.select(_root(), key)
    if value is None:
        return "null" if key.partition(".")[0] in ROOT_KEYS else None
    return value if isinstance(value, str) else str(value).lower()


@cache
def _root() -> DictConfig:
    node: Any = OmegaConf.load(CONF / "config.yaml")
    return node


def _text(key: str, value: str) -> str:
    """A part of the name: an option or a name alone, any other value after the last word of its key. Of a path or a
    dotted name, its last part."""
    last = key.rpartition(".")[2]
    separator = r"\." if last == "target" else r"[/\\]"
    short = _cut(re.split(separator, value.strip("'\" /"))[-1], LONGEST_VALUE)
    return short if key in default_options() or last in NAMES else f"{last}{short}"


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
