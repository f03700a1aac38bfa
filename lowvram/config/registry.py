"""The options of each group: all of them, and the neutral ones. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lowvram.config.defaults import CONF, default_options
from lowvram.config.plugins import NEUTRAL, folders
from lowvram.config.schema import build
from lowvram.config.settings import KNOB_GROUPS


@cache
def neutral_options() -> Mapping[str, str]:
    """Knob group -> the option that conf/config.yaml chooses, or that of the plug-in that brings the group."""
    return {group: default_options().get(group, NEUTRAL) for group in KNOB_GROUPS}


Option = tuple[str, str]  # group, option


@cache
def options_of(group: str) -> Sequence[str]:
    """The options of one group."""
    return sorted(path.stem for folder in (CONF / group, *folders(group)) for path in folder.glob("*.yaml"))


@cache
def ready_options(group: str) -> Sequence[str]:
    """The options of one group that work without a value from the user."""
    return [option for option in options_of(group) if not OmegaConf.missing_keys(node_of(group, option))]


@cache
def all_options() -> Sequence[Option]:
    """Every option of every knob group that works without a value from the user, in the order of conf/config.yaml."""
    return [(group, option) for group in neutral_options() for option in ready_options(group)]


@cache
def knob_of(option: Option) -> Any:
    """The knob of one option, with the values of its YAML."""
    return build(node_of(*option), option[0])


def read_all() -> None:
    """Read every option of every knob group once, for this process and those that are forked from it."""
    for option in all_options():
        knob_of(option)


def node_of(group: str, name: str) -> DictConfig:
    """The YAML of one option of any group."""
    paths = [folder / f"{name}.yaml" for folder in (CONF / group, *folders(group))]
    return _load(next((path for path in paths if path.is_file()), paths[0]))


def _load(path: Path) -> DictConfig:
    node = OmegaConf.load(path)
    assert isinstance(node, DictConfig)
    return node
