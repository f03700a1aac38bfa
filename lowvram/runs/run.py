"""Runs one point from the parent: children compute it, recorder.py records their events. With process=inline it is
computed in the parent itself. Imports no torch before such a point runs.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lowvram.config.settings import is_plan
from lowvram.fidelity.client import Comparison
from lowvram.launch.client import LIBRARIES, Runner
from lowvram.launch.last_resort import last_resort
from lowvram.launch.native_log import NativeLogs
from lowvram.launch.outcome import Circumstances, num_oom_kills
from lowvram.launch.spec import Point
from lowvram.launch.stop import StopConditions, Watch
from lowvram.planning.client import Plans
from lowvram.results.row import Row, Status
from lowvram.results.terminal import Progress, QuietProgress
from lowvram.runs.recorder import Recording
from lowvram.runs.retry import continued

WORKER = "lowvram.worker.in_process"  # imported where it is used, as it imports torch
NOTHING_PLANNED = {"reason": "no plan is made with process=inline"}


def run_point(
    point: Point,
    server: Runner,
    progress: Progress,
    stop_signals: Callable[[], int],
    plan_again: Callable[[Point], Point],
) -> Row:
    """Run one point and write its row; returns the row.

    Args:
        stop_signals: returns how often somebody has asked to stop.
        plan_again: plans the point anew after its number of parts has changed.
    """
    server.wait_until_ready(StopConditions(None, stop_signals))
    recording = Recording(continued(point), progress, server.disturbs, server.is_fresh and point.launch is None)
    stop_conditions = StopConditions(point.config["timeout_s"], stop_signals)
    try:
        while True:
            if recording.point.attempts:
                recording.plan_anew(plan_again)
            around = Circumstances(point.folder, stop_conditions, num_oom_kills(), point.config["vram"])
            watch = Watch(stop_conditions, NativeLogs(point.folder))
            with last_resort.guarding(stop_conditions.late_s, recording.abandon):
                ended = server.run(recording.point, recording.on_event, watch)
            watch.logs.cut()
            recording.conclude(ended, around)
            if not (recording.begins_again(stop_conditions) or recording.measures_again(stop_conditions)):
                add_fidelity(recording, server, stop_signals)
                return recording.close()
    except OSError as error:
        return recording.unwritable(error)


def row_inline(point: Point, stop_signals: Callable[[], int]) -> tuple[Row | None, BaseException | None]:
    """Plan or run a point in this process, as its mode asks, and write its row.

    Returns:
        The row, and the exception that ended the point, if it was unexpected.
    """
    os.environ |= {**LIBRARIES, **os.environ}  # as in the fork server's children
    here: Any = importlib.import_module(WORKER).Inline()
    progress = QuietProgress(sys.stdout)  # a progress bar would overwrite a debugger's prompt
    if is_plan(point.choices):
        return Plans(here, progress, stop_signals).row(point), here.error

    def unplanned(point: Point) -> Point:
        return replace(point, plan=NOTHING_PLANNED)

    return run_point(unplanned(point), here, progress, stop_signals, unplanned), here.error


def add_fidelity(recording: Recording, server: Runner, stop_signals: Callable[[], int]) -> None:
    """Compares a point that ended well with references, if measure.fidelity=true, and adds the figures to its row. An
    interrupted comparison is marked interrupted, so a re-run repeats it."""
    point = recording.point
    if recording.row["status"] != Status.OK or not point.config["measure"]["fidelity"]:
        return
    comparison = Comparison(point, server, recording.progress, stop_signals).measure()
    if stop_signals() and comparison["reason"] is not None:
        recording.end(Status.INTERRUPTED, "stopped while its fidelity was measured")
    recording.add({"fidelity": comparison})
