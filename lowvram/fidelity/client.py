"""measure.fidelity=true: how far a point's gradients and losses are from those without any technique that saves memory.

After the point itself has ended, in children of their own, so that neither its peak nor its times know of it: first
references (reference.py) with three seeds, then the point's own configuration once more, from its initial weights.
Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from lowvram.config.errors import Refused
from lowvram.config.identity import device_name, installed_version
from lowvram.config.settings import GROUPS, is_inline
from lowvram.config.version import __version__
from lowvram.fidelity.band import band, loss_gap
from lowvram.launch.client import Event, Server
from lowvram.launch.in_process import Inline
from lowvram.launch.outcome import Circumstances, Told, num_oom_kills, outcome_of
from lowvram.launch.point import Point, with_parts
from lowvram.launch.stop import Orders
from lowvram.launch.torchrun import Launch
from lowvram.results.files.durable import remove_leftovers, write_text
from lowvram.results.files.run_folder import remove_empty, remove_files
from lowvram.results.files.sealed import opened, sealed
from lowvram.results.row import Status, to_json
from lowvram.results.terminal import Progress

NUM_SEEDS = 3  # of the references: the point's own, and those that follow it
GRADIENTS = "gradients.safetensors"
REFERENCES = "references"  # the folder of a sweep that keeps their losses
Request = dict[str, Any]
Found = dict[str, Any]  # the section "fidelity" of a row


class Unknown(Exception):
    """A child could not tell what it was asked."""


def check_fresh(config: Mapping[str, Any], launch: Launch | None) -> None:
    """Raises Refused where there can be no processes beside those of the point."""
    if config["measure"]["fidelity"] and (is_inline(config) or launch is not None):
        where = "with process=inline" if is_inline(config) else "under torchrun (sharding.ranks=2 or more needs none)"
        raise Refused(f"measure.fidelity=true: must be false {where}, for it takes processes of its own")


@dataclass
class Heard:
    """What one child has told, and how it ended."""

    on_step: Callable[[int], None]
    told: dict[int, Told] = field(default_factory=dict)  # by rank
    more_parts: int | None = None  # of the next attempt, if this one runs out of memory
    compared: dict[str, float | None] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    status: Status = Status.OK
    reason: str | None = None

    def on_event(self, event: Event) -> None:
        kind = event.pop("event")
        if kind == "row":
            rank = event.pop("rank")
            self.told[rank] = Told(**event)
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
        """Of the row, as the first rank knows them."""
        return self.told[0].fields


@final
class Comparison:
    """The fidelity of one point."""

    def __init__(
        self, point: Point, server: Server | Inline, progress: Progress, stop_signals: Callable[[], int]
    ) -> None:
        self.point, self.server, self.progress, self.stop_signals = point, server, progress, stop_signals
        self.num_steps: int = point.config["measure"]["fidelity_steps"]
        self.folder = point.folder / "fidelity"  # of the children, while they run
        self.num_done = 0  # steps of the children before

    def found(self) -> Found:
        """What the row says; what isn't known is null, with the reason."""
        unknown = ("gradient_error", "gradient_cosine", "loss_gap", "losses", "band", "reference", "reason")
        found: Found = {**dict.fromkeys(unknown), "steps": self.num_steps}
        self.progress.start(f"{self.point.name}: fidelity", (NUM_SEEDS + 1) * self.num_steps)
        self.folder.mkdir(exist_ok=True)
        try:
            self.fill(found)
        except Unknown as why:
            found["reason"] = str(why)
        finally:
            remove_files([self.folder / GRADIENTS, *self.folder.glob("native.log"), *self.folder.glob("native.*.log")])
            remove_leftovers(self.folder)  # of a child that was killed
            remove_empty([self.folder])
            self.progress.stop()
        return found

    def fill(self, found: Found) -> None:
        """Raises Unknown when no more can be known."""
        gradients = self.folder / GRADIENTS
        reference = Reference(self, self.request_of_reference())
        reference.leave_gradients(gradients)
        bounds = band([reference.losses(number) for number in range(NUM_SEEDS)])
        heard = self.run(self.point.request(), self.num_steps, gradients, is_reference=False)
        found |= {**heard.compared, "reference": reference.told(), "band": bounds}
        self.check(heard, "the point")
        found |= {"losses": heard.losses, "loss_gap": loss_gap(heard.losses, bounds)}

    def request_of_reference(self) -> Request:
        """What a child says that the reference is."""
        request = self.point.request()
        heard = self.hear({"reference": {name: request[name] for name in ("config", "choices")}})
        self.check(heard, "the reference")
        return request | heard.fields["reference"]

    def run(self, request: Request, num_steps: int, gradients: Path | None, is_reference: bool) -> Heard:
        """So many steps of what `request` describes, in a child that leaves or compares gradients."""
        about = {"steps": num_steps, "file": gradients and str(gradients), "is_reference": is_reference}
        return self.hear(request | {"folder": str(self.folder), "resume": False, "fidelity": about})

    def hear(self, request: Request) -> Heard:
        """What a child tells until its end; once more if it was killed, which says nothing of the training."""
        heard = self.hear_once(request)
        return self.hear_once(request) if heard.status == Status.KILLED and not self.stop_signals() else heard

    def hear_once(self, request: Request) -> Heard:
        heard = Heard(lambda step: self.progress.update(self.num_done + step, {}))
        orders = Orders(self.point.config["timeout_s"], self.stop_signals)
        around = Circumstances(self.folder, orders, num_oom_kills(), self.point.config["vram"])
        ended = self.server.run(request, heard.on_event, orders, self.point.locks)
        end = outcome_of(ended, heard.told, around, self.point.config["sharding"]["timeout_s"])
        heard.status, heard.reason = end.status, end.reason
        return heard

    def check(self, heard: Heard, who: str, hint: str = "") -> None:
        """Raises Unknown unless a child has ended well."""
        if heard.status != Status.OK and self.stop_signals():
            raise Unknown("stopped before it was known")
        if heard.status != Status.OK:
            raise Unknown(f"{who}, run for comparison, ended so: {heard.status}: {heard.reason}{hint}")


@final
class Reference:
    """The same training without any saving, in as few parts as fit: parts of a batch change no gradient.

    Raises Unknown where it can't be had.
    """

    def __init__(self, comparison: Comparison, request: Request) -> None:
        self.comparison, self.request = comparison, request

    def leave_gradients(self, file: Path) -> None:
        """Of a first step, with the point's own seed."""
        self.run(self.request["config"]["seed"], 1, file)

    def losses(self, number: int) -> list[float]:
        """With the seed of that number. All points of a sweep that have the same reference share them."""
        point, seed = self.comparison.point, (self.request["config"]["seed"] + number) % 2**63
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
        """What another point has left; None if none has, or the file is damaged."""
        try:
            told = json.loads(opened(file.read_text()))
            if told["id"] == file.stem:
                return told["losses"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError):
            pass
        self.comparison.progress.say(f"{file} is damaged, or another reference's: the reference is run again")
        return None

    def run(self, seed: int, num_steps: int, gradients: Path | None) -> Heard:
        """In more parts after it ran out of memory."""
        while True:
            request = self.request | {"config": {**self.request["config"], "seed": seed}}
            heard = self.comparison.run(request, num_steps, gradients, is_reference=True)
            if heard.status != Status.OOM or heard.more_parts is None:
                break
            self.request = self.request | {"config": with_parts(self.request["config"], heard.more_parts)}
        hint = "; without vram it may fit" if heard.status == Status.OOM and self.request["config"]["vram"] else ""
        self.comparison.check(heard, "the reference", hint)
        if self.num_parts > 1 and heard.fields["semantics_changed"]:
            raise Unknown(f"the reference fits in {self.num_parts} parts alone: {heard.fields['semantics_changed']}")
        return heard

    @property
    def num_parts(self) -> int:
        return self.request["config"]["accum"]["parts"]

    def id(self, seed: int) -> str:
        """The same training on the same device with the same versions gets the same one."""
        config = self.request["config"]
        groups = {group: config[group] for group in GROUPS if group not in ("mode", "accum")}
        about = [groups, config["train"]["batch_size"], config["device"], seed, self.comparison.num_steps]
        where = [__version__, installed_version("torch"), device_name()]
        return hashlib.sha256(json.dumps([about, where], sort_keys=True, default=str).encode()).hexdigest()[:16]

    def told(self) -> dict[str, Any]:
        """What it is, where a reader may wonder."""
        choices = self.request["choices"]
        return {"optimizer": choices["optimizer"], "adapter": choices["adapter"], "parts": self.num_parts}
