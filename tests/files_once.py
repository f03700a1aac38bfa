"""Hydra composes for half a second what a test then runs for less: here it does so without parsing a file twice, and
once for each call."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra._internal.hydra import Hydra
from omegaconf import OmegaConf

from tests.calls import ROOT

CONF = ROOT / "conf"
_load: Callable[[Any], Any] = OmegaConf.load
_mode: Callable[..., Any] = Hydra.get_mode
_parsed: dict[tuple[str, int], bytes] = {}


def read_once(file_: Any) -> Any:
    """`OmegaConf.load`, which parses a file of this project but once, unless it changes. Hydra hands it open files."""
    path = Path(file_ if isinstance(file_, str | Path) else getattr(file_, "name", ""))
    if CONF not in path.parents:
        return _load(file_)
    key = (str(path), path.stat().st_mtime_ns)
    if key not in _parsed:
        _parsed[key] = pickle.dumps(_load(file_))
    return pickle.loads(_parsed[key])


def mode_of(self: Hydra, config_name: str | None, overrides: list[str]) -> Any:
    """`Hydra.get_mode`, which composes all to see whether `hydra.mode` is set: only where a word may set it."""
    if any(word.lstrip("+").startswith(("sweep=", "hydra.mode=")) for word in overrides):
        return _mode(self, config_name, overrides)
    return None
