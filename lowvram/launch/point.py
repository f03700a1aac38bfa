"""A point: one full configuration that is to run, as its parent knows it. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lowvram.launch.spec import PointSpec
from lowvram.launch.torchrun import Launch
from lowvram.results.row import Row

Config = Mapping[str, Any]
Attempts = list[dict[str, Any]]
Measurement = dict[str, Any]


class Logged(NamedTuple):
    """What a run is called at its loggers: see config/run_names.py."""

    name: str
    group: str | None  # of runs that belong together, such as the points of a sweep


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
    logged: Logged | None = None
    is_resumed: bool = False
    earlier: Row | None = None  # of the run that it continues: see runs/earlier.py
    launch: Launch | None = None  # if torchrun has started this program
    plan: Mapping[str, Any] | None = None  # the row's field: the memory and time predicted for it
    attempts: Attempts | None = None  # earlier ones, with fewer parts, that ran out of memory: see runs/retry.py
    reruns: list[Measurement] | None = None  # earlier measurements that were disturbed: see runs/retry.py
    notes: Mapping[str, str] = field(default_factory=dict)  # what was typed and composed, for `.hydra/`
    run: str | None = None  # the id that its snapshots carry
    locks: Sequence[int] = ()  # descriptors of locks that its processes keep open: see results/files/run_folder.py

    @property
    def first_rank(self) -> int:
        """The lowest rank among the processes that this program has started."""
        return 0 if self.launch is None else self.launch.rank

    def first_row(self) -> Row:
        """The row before it runs."""
        return self.spec().first_row()

    def spec(self) -> PointSpec:
        """What its processes run."""
        about = {name: getattr(self, name) for name in ("id", "name", "index", "plan", "provenance", "attempts")}
        about |= {"reruns": self.reruns, "logged": {} if self.logged is None else self.logged._asdict()}
        return PointSpec(self.folder, self.config, self.choices, about, self.is_resumed, self.run, self.sweep)


def with_chosen(config: Config, plan: Mapping[str, Any] | None) -> dict[str, Any]:
    """The same configuration with the values that its plan has chosen, such as ckpt.blocks."""
    chosen = (plan or {}).get("chosen", {})
    return {**config, **{group: {**config[group], **values} for group, values in chosen.items()}}


def without_chosen(config: Config, plan: Mapping[str, Any] | None) -> dict[str, Any]:
    """The configuration that another plan can choose for."""
    chosen = (plan or {}).get("chosen", {})
    return {**config, **{group: {**config[group], **dict.fromkeys(values)} for group, values in chosen.items()}}


def with_parts(config: Config, parts: int) -> dict[str, Any]:
    """The same configuration with another number of parts."""
    return {**config, "accum": {**config["accum"], "parts": parts}}
