"""mode=search, in the parent: one child finds candidates, and the best of them run as points. Imports no torch."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, final

from hydra import compose

from lowvram.config import identity, wandb_environment
from lowvram.config.compose import chosen, plain
from lowvram.config.run_names import sweep_group
from lowvram.config.secret import words_without_secrets
from lowvram.config.settings import CHILDS_OWN, KNOB_GROUPS
from lowvram.config.words import key
from lowvram.launch.client import Event, Server
from lowvram.launch.spec import Point, with_chosen
from lowvram.launch.stop import StopConditions
from lowvram.results import row as rows
from lowvram.results import table
from lowvram.results.loggers import wandb_sweep
from lowvram.results.report import report
from lowvram.results.row import Row, Status
from lowvram.results.terminal import Progress
from lowvram.runs.run import run_point
from lowvram.search import result
from lowvram.search.measuring import Measured, OneByOne, Probes

MODE = "search"  # conf/mode/search.yaml
FIRST_SEARCHED = 2  # the plan from which on progress is shown: after the first, the search may still be refused
NUM_LISTED = 10  # candidates in the table of a search that only plans
Candidate = Mapping[str, Any]  # a plan, and the options that it changes


@dataclass
class Candidates:
    """What the child reports of its search."""

    ranking: Sequence[Candidate] = ()  # in the order of `worker.search`
    account: Sequence[str] = ()  # lines that say what was ruled out
    refusal: str | None = None  # that nothing fits, if none of the ranking runs
    ending: dict[str, Any] = field(default_factory=dict)


@final
@dataclass
class Searches:
    """The searches of one call of the command line."""

    server: Server
    progress: Progress
    stop_signals: Callable[[], int]
    plan_again: Callable[[Point], Point]
    beside: Callable[[], AbstractContextManager[Probes]] | None = None  # runs probes side by side

    def row(self, point: Point, words: Sequence[str]) -> Row | None:
        """Search, and write the rows of the measured candidates below the point's folder.

        Args:
            words: the overrides typed for this point.

        Returns:
            The winner's row, or one that says why there is none; None: a stop was requested before that was known.
        """
        ends = deadline(point)
        candidates = self.find(point, {key(word) for word in words}, ends)
        if not candidates.ranking:
            return None if self.stop_signals() else self.ended(point, candidates.ending)
        is_real, num_wanted = runs_here(point), point.config["search"]["probes"]
        ranking = measuring_order(candidates.ranking, num_wanted) if is_real else candidates.ranking
        probes = (probe_of(point, words, number, each, is_real) for number, each in enumerate(ranking))
        measured = self.measure(probes, num_wanted, ends) if is_real else planned_rows(islice(probes, NUM_LISTED))
        if not measured:
            return None if self.stop_signals() else self.ended(point, too_late(point))
        if candidates.refusal and all(row["status"] == Status.OOM for row in measured):
            ending = {"status": Status.INCOMPATIBLE.value, "reason": candidates.refusal}
            return None if self.stop_signals() else self.ended(point, ending)
        best = min(measured, key=result.sort_key)
        table.save(point.folder, measured)
        report.save(point.folder)
        self.progress.show(table.render(measured))
        for line in wandb_sweep.record(point.folder, point.config["logger"]):
            self.progress.say(line)
        changes = ranking[best["index"]]["changes"]
        for line in (*candidates.account, *result.report(point.folder, words, best, changes)):
            self.progress.say(line)
        row = {**best, "id": point.id, "name": point.name, "index": point.index}
        if point.sweep:
            rows.write(point.folder, row)
        return row

    def find(self, point: Point, typed: set[str], ends: float) -> Candidates:
        """Run the search in a child process; returns its candidates.

        Args:
            ends: by time.monotonic().
        """
        candidates = Candidates()

        def on_event(event: Event) -> None:
            kind = event.pop("event")
            if kind == "searched":
                if event["num_plans"] == FIRST_SEARCHED:
                    self.progress.start(MODE, None, "plan")
                if event["num_plans"] >= FIRST_SEARCHED:
                    self.progress.update(event["num_plans"], {})
            elif kind == "say":
                self.progress.say(event["text"])
            elif kind == "found":
                candidates.ranking, candidates.account = event["ranking"], event["account"]
                candidates.refusal = event["refusal"]

        config = {name: point.config[name] for name in CHILDS_OWN}
        pinned = [group for group in KNOB_GROUPS if group in typed]
        about = {"config": config, "choices": point.choices, "is_real": runs_here(point)}
        if runs_here(point):
            candidates.ending = self.server.ask("calibrate", {"point": about}, self.conditions(ends), on_event)
        if candidates.ending.get("status", Status.OK) == Status.OK and not self.stop_signals():
            asked = {"point": about, "pinned": pinned}
            candidates.ending = self.server.ask("search", asked, self.conditions(ends), on_event)
        self.progress.stop()
        if time.monotonic() >= ends and not candidates.ranking:
            candidates.ending = too_late(point)
        return candidates

    def conditions(self, ends: float) -> StopConditions:
        return StopConditions(None if ends == math.inf else max(0.0, ends - time.monotonic()), self.stop_signals)

    def ended(self, point: Point, ending: dict[str, Any]) -> Row:
        """The row of a search that found nothing."""
        unknown = {"status": Status.KILLED.value, "reason": "the search process was killed from outside"}
        row = rows.merge(point.first_row(), ending or unknown)
        if point.sweep:
            rows.write(point.folder, row)
        return row

    def measure(self, probes: Iterable[Point], num_wanted: int, ends: float) -> list[Row]:
        """Run candidates until `num_wanted` of them have fitted, or the search's time is up."""
        measured = Measured(num_wanted, ends, self.stop_signals, self.progress.say)
        with self.beside() if self.beside else nullcontext(OneByOne(self.run)) as running:
            measured.measure(probes, running)
        return measured.rows

    def run(self, probe: Point) -> Row:
        return run_point(probe, self.server, self.progress, self.stop_signals, self.plan_again)


def deadline(point: Point) -> float:
    """When the whole search ends, by time.monotonic(); infinity if it has no limit."""
    seconds = point.config["search"]["max_seconds"]
    return math.inf if seconds is None else time.monotonic() + seconds


def too_late(point: Point) -> dict[str, Any]:
    """The end of a search that has measured nothing in its time."""
    reason = f"nothing was measured within search.max_seconds={point.config['search']['max_seconds']:g}"
    return {"status": Status.TIMEOUT.value, "reason": reason}


def runs_here(point: Point) -> bool:
    """Whether candidates are measured; for another device they are only planned."""
    return point.config["plan"]["device"] == "auto"


def measuring_order(ranking: Sequence[Candidate], num_wanted: int) -> list[Candidate]:
    """The order in which candidates are measured: as they are ranked, but as the last of the `num_wanted` the one with
    the smallest product of time and memory, of those that fit with their margin.

    The fastest candidates are often similar, and so are the errors of their predicted times. A candidate that needs
    less memory, and so fits a device's caches, can be a third faster than predicted.
    """
    if not 1 < num_wanted < len(ranking):
        return list(ranking)
    sooner, later = list(ranking[: num_wanted - 1]), list(ranking[num_wanted - 1 :])
    fitting = [plan for plan in ranking if plan["fits"]]
    thriftiest = min(fitting, key=lambda plan: plan["step_ms"] * plan["least_vram_bytes"])
    return [*sooner, *sorted(later, key=lambda plan: plan is not thriftiest)]


def probe_of(point: Point, words: Sequence[str], number: int, candidate: Candidate, is_real: bool) -> Point:
    """A candidate as a point: what was typed, with the options that the search has chosen."""
    changes = dict(candidate["changes"])
    chosen_words = result.with_changes(words, changes)
    mode = "measure" if is_real else "plan"
    config = compose("config", [*chosen_words, f"mode={mode}"], return_hydra_config=True)
    folder = point.folder / identity.point_id(_root_=config)
    command = shlex.join(["python", "train.py", *words_without_secrets([*chosen_words, f"mode={mode}"])])
    return Point(
        id=folder.name,
        name=name_of(changes),
        index=number,
        folder=folder,
        config=with_chosen(plain(config), candidate),
        choices=chosen(config.hydra.runtime.choices),
        sweep=point.folder.name,
        provenance=identity.provenance(point.config["seed"], command),
        logged={"name": name_of(changes), "group": group_of(point)},
        plan={name: value for name, value in candidate.items() if name != "changes"},
        locks=point.locks,
        fence=point.fence,
    )


def name_of(changes: Mapping[str, str]) -> str:
    """The options that a candidate changes, in one word."""
    words = " ".join(changes.values()).split()
    return "-".join(word.rpartition(".")[2] for word in words) or "as typed"


def group_of(point: Point) -> str:
    """The group of a search's runs."""
    return point.config["logger"]["group"] or wandb_environment.group(point.config) or sweep_group(point.folder, [MODE])


def planned_rows(probes: Iterable[Point]) -> list[Row]:
    """The rows of candidates that are only planned."""
    planned: list[Row] = []
    for probe in probes:
        probe.folder.mkdir(parents=True, exist_ok=True)
        planned.append(rows.merge(probe.first_row(), {"status": Status.OK.value}))
        rows.write(probe.folder, planned[-1])
    return planned
