"""The defaults list of conf/config.yaml, which defines the groups. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

PACKAGE = Path(__file__).resolve().parents[1]
ROOT = PACKAGE.parent
INSTALLED_CONF = PACKAGE / "conf"  # where the installed package has it
CONF = INSTALLED_CONF if INSTALLED_CONF.is_dir() else ROOT / "conf"


@cache
def default_options() -> Mapping[str, Any]:
    """Group -> the option that conf/config.yaml chooses (None: none), for every group of lowvram."""
    node = OmegaConf.load(CONF / "config.yaml")
    assert isinstance(node, DictConfig)
    chosen = [item for item in node.defaults if isinstance(item, DictConfig)]
    return {str(group): option for item in chosen for group, option in item.items()}
