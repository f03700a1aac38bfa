"""One point, as its parent knows it: its children compute it, recording.py keeps what they tell. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lowvram.config import build_as, checked_values, require
from lowvram.fidelity import add_fidelity
from lowvram.growing import Attempts, as_left, attempts_with, with_parts
from lowvram.hydra_notes import Notes
from lowvram.process.client import Server
from lowvram.process.inline import Inline
from lowvram.process.launch import Launch, as_request
from lowvram.process.native_log import NativeLogs
from lowvram.process.orders import Orders
from lowvram.recording import Recording
from lowvram.remeasuring import Measurement
from lowvram.results import row as rows
from lowvram.results.row import Row
from lowvram.results.terminal import Progress
from lowvram.results.wandb import RECORDERS
from lowvram.run_folder import has_snapshots
from lowvram.secret import without_secrets
from lowvram.settings import GROUPS, PARENT_ONLY, ROOT_KEYS
from lowvram.verdict import Circumstances, num_oom_kills

CHILDS_OWN = (*ROOT_KEYS, *GROUPS, *PARENT_ONLY)  # the keys of the configuration that a child is told


@dataclass(frozen=True)
class LoggerSettings:
    """`logger.*`"""

    name: str
    entity: str | None
    project: str | None

    def __post_init__(self) -> None:
        require(self.name in RECORDERS, "logger.name", self.name, f"one of {', '.join(RECORDERS)}")


@dataclass(frozen=True)
class PathSettings:
    """`paths.*`"""

    outputs: str


def check_own(config: DictConfig) -> None:
    """The groups that no child sees. Raises BadInput for a key that they don't know."""
    for key, cls in {"logger": LoggerSettings, "paths": PathSettings}.items():
        build_as(cls, checked_values(config[key], key), key)


@dataclass(frozen=True)
class Point:
    """What the parent knows of a point before it runs."""

    id: str
    name: str  # what was swept, or the run's name
    index: int  # its place in the sweep
    folder: Path
    config: dict[str, Any]  # composed and resolved
    choices: dict[str, str]  # group -> option
    sweep: str | None  # the name of its sweep
    provenance: dict[str, Any]
    is_resumed: bool = False
    launch: Launch | None = None  # if torchrun has started this program
    plan: Mapping[str, Any] | None = None  # what it is expected to hold
    attempts: Attempts | None = None  # with fewer parts, that ran out of memory: see growing.py
    reruns: list[Measurement] | None = None  # that something has disturbed: see remeasuring.py
    notes: Notes = field(default_factory=dict)  # what was typed and composed, for `.hydra/`
    run: str | None = None  # what it is called in its snapshots
    locks: Sequence[int] = ()  # descriptors that its processes keep open: see run_folder.py

    @property
    def first_rank(self) -> int:
        """Of those whose processes this program has started."""
        return 0 if self.launch is None else self.launch.rank

    def first_row(self) -> Row:
        known = {"id": self.id, "name": self.name, "index": self.index, "choices": self.choices, "config": self.config}
        more = {"plan": self.plan, "provenance": self.provenance, "attempts": self.attempts}
        more |= {"reruns": self.reruns}
        return rows.merge(rows.empty_row(), without_secrets(known | more))

    def request(self) -> dict[str, Any]:
        """What its children are told."""
        return {
            "config": {key: self.config[key] for key in CHILDS_OWN},
            "choices": self.choices,
            "folder": str(self.folder),
            "resume": self.is_resumed,
            "run": self.run,
            "threads": len(os.sched_getaffinity(0)),
            "launch": as_request(self.launch),
        }

    def as_left(self) -> Point:
        """A run that goes on has the parts that it had grown to."""
        config, attempts = as_left(self.config, rows.read(self.folder) if self.is_resumed else None)
        return self if attempts is None else replace(self, config=dict(config), attempts=attempts, plan=None)

    def in_parts(self, parts: int, row: Row) -> Point:
        """The next attempt, after one with `row` that ran out of memory."""
        config, is_resumed = with_parts(self.config, parts), has_snapshots(self.folder)
        return replace(self, config=config, is_resumed=is_resumed, attempts=attempts_with(row), plan=None)


@dataclass(frozen=True)
class Watch:
    """What the server asks again and again while the processes of a point run."""

    orders: Orders
    logs: NativeLogs

    def __call__(self) -> bytes | None:
        self.logs.look()
        return self.orders()


def run_point(
    point: Point,
    server: Server | Inline,
    progress: Progress,
    stop_signals: Callable[[], int],
    plan_again: Callable[[Point], Mapping[str, Any] | None],
) -> Row:
    """Run one point and leave its row.

    Args:
        stop_signals: how often somebody asked to stop so far.
        plan_again: what the point is expected to hold in other parts than it was planned in.
    """
    server.wait_until_ready(Orders(None, stop_signals))
    recording = Recording(point.as_left(), progress, server.disturbs, server.is_fresh and point.launch is None)
    orders = Orders(point.config["timeout_s"], stop_signals)
    try:
        while True:
            if recording.point.attempts:
                recording.add({"plan": plan_again(recording.point)})
            around = Circumstances(point.folder, orders, num_oom_kills(), point.config["vram"])
            watch = Watch(orders, NativeLogs(point.folder))
            ended = server.run(recording.point.request(), recording.on_event, watch, point.locks)
            watch.logs.cut()
            recording.conclude(ended, around)
            if not (recording.begins_again(orders) or recording.measures_again(orders)):
                add_fidelity(recording, server, stop_signals)
                return recording.close()
    except OSError as error:
        return recording.unwritable(error)
