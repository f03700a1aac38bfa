"""measure.fidelity=true: how far a point's gradients and losses are from those without any technique that saves memory.

Runs after the point itself has ended, in child processes, so that neither its peak nor its times change: first
references (reference.py) with three seeds, then the point's own configuration once more, from its initial weights.
Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from lowvram.config.errors import Refused
from lowvram.config.identity import device_name, installed_version
from lowvram.config.settings import CHILDS_OWN, GROUPS, is_inline
from lowvram.config.version import __version__
from lowvram.fidelity.band import band, loss_gap
from lowvram.launch import events, spec
from lowvram.launch.client import Ending, Event, Runner
from lowvram.launch.native_log import NativeLogs
from lowvram.launch.outcome import Circumstances, RankReport, num_oom_kills, outcome_of
from lowvram.launch.spec import Point, with_parts
from lowvram.launch.stop import StopConditions, Watch
from lowvram.launch.torchrun import Launch
from lowvram.results.files.durable import remove_empty, remove_files, remove_leftovers, write_text
from lowvram.results.files.regular import LONG_BYTES, read_regular
from lowvram.results.files.sealed import opened, sealed
from lowvram.results.row import Status, to_json
from lowvram.results.terminal import Progress

NUM_SEEDS = 3  # of the references: the point's own, and those that follow it
GRADIENTS = "gradients.safetensors"
REFERENCES = "references"  # the folder in a sweep's folder that keeps the references' losses
Start = Callable[..., list[Ending] | None]  # of a child, given its listener and what to end it by
Fields = dict[str, Any]  # the section "fidelity" of a row


class NotComparable(Exception):
    """A run of the comparison failed; the message says which and why."""


def check_fresh(config: Mapping[str, Any], launch: Launch | None) -> None:
    """Raise Refused if the comparison can't be made because the point can't have further processes."""
    if config["measure"]["fidelity"] and (is_inline(config) or launch is not None):
        where = "with process=inline" if is_inline(config) else "under torchrun (sharding.ranks=2 or more needs none)"
        raise Refused(f"measure.fidelity=true: must be false {where}, for it takes processes of its own")


@dataclass
class ChildResult:
    """The events that one child process sent, and how it ended."""

    on_step: Callable[[int], None]
    rows: dict[int, RankReport] = field(default_factory=dict)  # by rank
    more_parts: int | None = None  # for a retry, if this attempt runs out of memory
    compared: dict[str, float | None] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    status: Status = Status.OK
    reason: str | None = None

    def on_event(self, event: Event) -> None:
        kind = event.pop("event")
        if kind == "row":
            rank = event.pop("rank")
            self.rows[rank] = RankReport(**event)
        elif kind == "begin":
            self.more_parts = event["more_parts"]
        elif kind == "progress":
            self.on_step(event["step"])
        elif kind == "compared":
            self.compared = event
        elif kind == "history":
            self.losses = event["losses"]

    @property
    def fields(self) -> dict[str, Any]:
        """The row's fields, as rank 0 sent them."""
        return self.rows[0].fields


@final
class Comparison:
    """Measures the fidelity of one point."""

    def __init__(self, point: Point, server: Runner, progress: Progress, stop_signals: Callable[[], int]) -> None:
        self.point, self.server, self.progress, self.stop_signals = point, server, progress, stop_signals
        self.num_steps: int = point.config["measure"]["fidelity_steps"]
        self.folder = point.folder / "fidelity"  # the children's files, while they run
        self.num_done = 0  # steps of earlier runs, for the progress bar

    def measure(self) -> Fields:
        """The section "fidelity" of the row. What couldn't be measured is null, and `reason` says why."""
        unknown = ("gradient_error", "gradient_cosine", "loss_gap", "losses", "band", "reference", "reason")
        fields: Fields = {**dict.fromkeys(unknown), "steps": self.num_steps}
        self.progress.start(f"{self.point.name}: fidelity", (NUM_SEEDS + 1) * self.num_steps)
        self.folder.mkdir(exist_ok=True)
        try:
            self.fill(fields)
        except NotComparable as why:
            fields["reason"] = str(why)
        finally:
            names = (GRADIENTS, events.FILE_NAME, spec.FILE_NAME, "native.log", "native.*.log")
            remove_files(path for name in names for path in self.folder.glob(name))
            remove_leftovers(self.folder)  # of a child that was killed
            remove_empty([self.folder])
            self.progress.stop()
        return fields

    def fill(self, fields: Fields) -> None:
        """Fill in the fields one after another. Raises NotComparable when a run fails."""
        gradients = self.folder / GRADIENTS
        reference = Reference(self, self.point_of_reference())
        reference.leave_gradients(gradients)
        bounds = band([reference.losses(number) for number in range(NUM_SEEDS)])
        child = self.run(self.point, self.num_steps, gradients, is_reference=False)
        fields |= {**child.compared, "reference": reference.described(), "band": bounds}
        self.check(child.status, child.reason, "the point")
        fields |= {"losses": child.losses, "loss_gap": loss_gap(child.losses, bounds)}

    def point_of_reference(self) -> Point:
        """A run of the reference. A child determines its configuration, as this needs torch."""
        config = {key: self.point.config[key] for key in CHILDS_OWN}
        arguments = {"config": config, "choices": self.point.choices}
        stop_conditions = StopConditions(self.point.config["timeout_s"], self.stop_signals)
        answer = self.server.ask("reference", arguments, stop_conditions)
        status, reason = answer.get("status", Status.KILLED), answer.get("reason", "the process that makes it has died")
        self.check(status, reason, "the reference")
        return replace(self.point, **answer["reference"])

    def run(self, point: Point, num_steps: int, gradients: Path | None, is_reference: bool) -> ChildResult:
        """Run `num_steps` steps of a point, in a child that writes gradients (the reference) or compares them with the
        written ones (the point)."""
        about = {"steps": num_steps, "file": gradients and str(gradients), "is_reference": is_reference}
        point = replace(point, folder=self.folder, is_resumed=False, fidelity=about)
        child = self.run_once(point)  # once more if the child was killed from outside
        return self.run_once(point) if child.status == Status.KILLED and not self.stop_signals() else child

    def run_once(self, point: Point) -> ChildResult:
        child = ChildResult(lambda step: self.progress.update(self.num_done + step, {}))
        stop_conditions = StopConditions(self.point.config["timeout_s"], self.stop_signals)
        around = Circumstances(self.folder, stop_conditions, num_oom_kills(), self.point.config["vram"])
        ended = self.server.run(point, child.on_event, Watch(stop_conditions, NativeLogs(self.folder)))
        end = outcome_of(ended, child.rows, around, self.point.config["sharding"]["timeout_s"])
        child.status, child.reason = end.status, end.reason
        return child

    def check(self, status: str, reason: str | None, who: str, hint: str = "") -> None:
        """Raises NotComparable unless a child ended with status ok."""
        if status != Status.OK and self.stop_signals():
            raise NotComparable("stopped before the comparison was complete")
        if status != Status.OK:
            raise NotComparable(f"{who}, run again for the comparison, ended with {status}: {reason}{hint}")


@final
class Reference:
    """Runs the same training without any technique that saves memory, except that the batch is split into as many parts
    as memory requires, which doesn't change gradients. Methods raise NotComparable if a run fails.
    """

    def __init__(self, comparison: Comparison, point: Point) -> None:
        self.comparison, self.point = comparison, point

    def leave_gradients(self, file: Path) -> None:
        """Have the gradients of a first step written to `file`, with the point's own seed."""
        self.run(self.point.config["seed"], 1, file)

    def losses(self, number: int) -> list[float]:
        """The losses by step with the seed of that number. Points of a sweep that have the same reference share
        them."""
        point, seed = self.comparison.point, (self.point.config["seed"] + number) % 2**63
        name = self.id(seed)
        file = point.folder.parent / REFERENCES / f"{name}.json"
        losses = self.kept(file) if point.sweep else None
        if losses is None:
            losses = self.run(seed, self.comparison.num_steps, None).losses
            if point.sweep:
                file.parent.mkdir(exist_ok=True)
                write_text(file, sealed(to_json({"id": name, "losses": losses})))
        self.comparison.num_done += self.comparison.num_steps
        return losses

    def kept(self, file: Path) -> list[float] | None:
        """The losses that another point of the sweep has written; None if there are none, or the file is damaged."""
        try:
            reference = json.loads(opened(read_regular(file, LONG_BYTES).decode()))
            if reference["id"] == file.stem:
                return reference["losses"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            pass
        self.comparison.progress.say(f"{file} is damaged, or another reference's: the reference is run again")
        return None

    def run(self, seed: int, num_steps: int, gradients: Path | None) -> ChildResult:
        """Run the reference; if it runs out of memory, again with more parts."""
        while True:
            point = replace(self.point, config={**self.point.config, "seed": seed})
            child = self.comparison.run(point, num_steps, gradients, is_reference=True)
            if child.status != Status.OOM or child.more_parts is None:
                break
            self.point = replace(self.point, config=with_parts(self.point.config, child.more_parts))
        hint = "; without vram it may fit" if child.status == Status.OOM and self.point.config["vram"] else ""
        self.comparison.check(child.status, child.reason, "the reference", hint)
        if self.num_parts > 1 and child.fields["semantics_changed"]:
            raise NotComparable(
                f"the reference fits in {self.num_parts} parts only, and {child.fields['semantics_changed']}"
            )
        return child

    @property
    def num_parts(self) -> int:
        return self.point.config["accum"]["parts"]

    def id(self, seed: int) -> str:
        """A hash: the same for the same training on the same device with the same versions."""
        config = self.point.config
        groups = {group: config[group] for group in GROUPS if group not in ("mode", "accum")}
        about = [groups, config["train"]["batch_size"], config["device"], seed, self.comparison.num_steps]
        where = [__version__, installed_version("torch"), device_name()]
        return hashlib.sha256(json.dumps([about, where], sort_keys=True, default=str).encode()).hexdigest()[:16]

    def described(self) -> dict[str, Any]:
        """The reference's choices that a reader can't guess from the point's."""
        choices = self.point.choices
        return {"optimizer": choices["optimizer"], "adapter": choices["adapter"], "parts": self.num_parts}
