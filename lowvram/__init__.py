"""lowvram: train models on a GPU that is too small, and know what every choice costs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lowvram.config import version

if TYPE_CHECKING:
    from lowvram.api import Knob, Measured, Part, Rig, Task, assemble, knob, ledger, load, measure, plan, step, task

__version__ = version.__version__
__all__ = [
    "Knob",
    "Measured",
    "Part",
    "Rig",
    "Task",
    "assemble",
    "knob",
    "ledger",
    "load",
    "measure",
    "plan",
    "step",
    "task",
]


def __getattr__(name: str) -> Any:
    """Imports lowvram/api.py, and with it torch, when one of its names is first used: the command line's parent process
    runs without torch."""
    if name in __all__:
        return getattr(importlib.import_module("lowvram.api"), name)
    raise AttributeError(f"module 'lowvram' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
