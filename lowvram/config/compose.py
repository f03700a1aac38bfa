"""Converts what Hydra has composed into plain values. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lowvram.config import secret
from lowvram.config.defaults import CONF, INSTALLED_CONF
from lowvram.config.errors import BadInput, Refused, require
from lowvram.config.plugins import offer, plugins
from lowvram.config.settings import GROUPS

SEVERAL = "several"  # Hydra names no option of `logger=[wandb,tensorboard]`


def chosen(choices: Mapping[str, Any]) -> dict[str, str]:
    """Group -> option, from Hydra's choices."""
    for group in GROUPS:
        require(choices.get(group) is not None, group, None, f"one option of the group {group}, not a list of them")
    return {group: choices[group] for group in GROUPS} | {"logger": choices.get("logger") or SEVERAL}


def output_folder() -> Path:
    """The output folder of the point that Hydra has composed."""
    return Path(HydraConfig.get().runtime.output_dir)


def config_path() -> str:
    """Where Hydra finds the configuration; it also finds the options of plug-ins from now on. Raises Refused if those
    can't be used."""
    if plugins():
        offer()
    return "pkg://lowvram.conf" if INSTALLED_CONF.is_dir() else str(CONF)


def plain(config: DictConfig) -> dict[str, Any]:
    """The resolved configuration without Hydra's own part, as plain values for JSON. Also learns its secrets, so that
    they are removed from all later texts."""
    values = {str(key): container(config[key]) for key in config if key != "hydra"}
    secret.learn(values)
    return values


def container(node: Any, resolve: bool = True) -> Any:
    return OmegaConf.to_container(node, resolve=resolve, enum_to_str=True) if OmegaConf.is_config(node) else node


def check_left_to_us(hydra: Any) -> None:
    """Raise BadInput if Hydra would write `.hydra` itself: see runs/hydra_notes.py."""
    require(
        hydra.output_subdir is None,
        "hydra.output_subdir",
        hydra.output_subdir,
        "null: lowvram writes .hydra itself, without secrets",
    )


MISTAKES = (BadInput, Refused, HydraException, OmegaConfBaseException)
