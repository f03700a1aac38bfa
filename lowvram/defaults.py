"""The options that conf/config.yaml chooses. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lowvram.identity import CONF
from lowvram.settings import KNOB_GROUPS


def default_options() -> dict[str, Any]:
    """Group -> the option that conf/config.yaml chooses (None: none), for every group."""
    node = OmegaConf.load(CONF / "config.yaml")
    assert isinstance(node, DictConfig)
    chosen = [item for item in node.defaults if isinstance(item, DictConfig)]
    return {str(group): option for item in chosen for group, option in item.items()}


@cache
def neutral_options() -> Mapping[str, str]:
    """The same for the knob groups."""
    return {group: option for group, option in default_options().items() if group in KNOB_GROUPS}
