"""process=inline: runs one point in this process, for debuggers and profilers; its figures aren't comparable.

Imports no torch before the point runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from omegaconf import DictConfig

from lowvram.config.errors import Refused
from lowvram.config.settings import is_inline, is_plan, is_search
from lowvram.launch.in_process import Inline
from lowvram.launch.point import Point
from lowvram.launch.torchrun import Launch
from lowvram.planning.client import Plans
from lowvram.results.row import Row
from lowvram.results.terminal import QuietProgress
from lowvram.runs.run import run_point

NOTHING_PLANNED = {"reason": "no plan is made with process=inline"}


def check_sweep(configs: Sequence[DictConfig]) -> None:
    """Raises Refused if a sweep of several points has one with process=inline."""
    if len(configs) > 1 and any(map(is_inline, configs)):  # pyright: ignore[reportArgumentType]
        raise Refused(f"process=inline: must be child for {len(configs)} points, each of which needs a process")


def check_alone(choices: Mapping[str, str], launch: Launch | None) -> None:
    """Raises Refused for torchrun and mode=search, which need more processes than this one."""
    if launch is not None:
        raise Refused("process=inline: must be child under torchrun")
    if is_search(choices):
        raise Refused("process=inline: must be child with mode=search, each of whose probes needs a process")


def row_inline(point: Point, stop_signals: Callable[[], int]) -> tuple[Row | None, BaseException | None]:
    """Plan or run a point in this process, as its mode asks, and write its row.

    Returns:
        The row, and the exception that ended the point, if it was unexpected.
    """
    here, progress = Inline(), QuietProgress(sys.stdout)  # a progress bar would overwrite a debugger's prompt
    if is_plan(point.choices):
        return Plans(here, progress, stop_signals).row(point), here.error
    point = replace(point, plan=NOTHING_PLANNED)
    return run_point(
        point, here, progress, stop_signals, lambda again: replace(again, plan=NOTHING_PLANNED)
    ), here.error
