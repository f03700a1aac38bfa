"""YAML files that are parsed once for all tests of a process."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from tests.calls import ROOT

CONF = ROOT / "conf"
_load: Callable[[Any], Any] = OmegaConf.load
_parsed: dict[tuple[str, int], bytes] = {}


def read_once(file_: Any) -> Any:
    """`OmegaConf.load`, which parses a file of this project but once, unless it changes."""
    if not isinstance(file_, str | Path) or CONF not in Path(file_).parents:
        return _load(file_)
    key = (str(file_), Path(file_).stat().st_mtime_ns)
    if key not in _parsed:
        _parsed[key] = pickle.dumps(_load(file_))
    return pickle.loads(_parsed[key])
