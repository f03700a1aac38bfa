"""The rows behind docs/techniques.md and the tables of other pages: sweeps as docs/results keeps them, without what is
of one machine's folders.

A file holds one sweep: a line with its command, then its rows. Needs no torch.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from lowvram.config.errors import Refused
from lowvram.config.identity import ROOT
from lowvram.results import table
from lowvram.results.ablation import baseline
from lowvram.results.files.durable import write_text
from lowvram.results.row import Row, Status, empty_row, merge, to_json

RESULTS = ROOT / "docs" / "results"
FOLDER = "techniques"  # below the folder of a device
OF_THE_PLACE = ("logger", "hydra.sweep.dir", "hydra.run.dir", "paths.outputs", "name")  # words that say where, not what
WITHOUT = ("id", "config", "plan", "precision", "attempts")
KEPT_CONFIG = ("seed", "vram", "train", "measure")
KEPT_PLAN = ("allocated_bytes", "reserved_bytes", "host_bytes", "least_vram_bytes", "fits", "step_ms", "by_kind_max")
OF_STEPS = ("losses", "band")  # of the fidelity


@dataclass(frozen=True)
class Sweep:
    """What one file holds."""

    command: str
    rows: Sequence[Row]

    @property
    def name(self) -> str:
        """Of its preset."""
        return next((word.partition("=")[2] for word in self.command.split() if key_of(word) == "sweep"), "sweep")

    @property
    def model(self) -> str:
        return self.rows[0]["choices"]["model"]

    @property
    def baseline(self) -> Row:
        return self.rows[baseline(self.rows)]

    def words(self, row: Row) -> str:
        """Those of this point alone; none for the baseline."""
        common = {key_of(word) for word in shlex.split(self.command)}
        return shlex.join(word for word in point_words(row) if key_of(word) not in common)

    def named(self, name: str) -> Row | None:
        """The point of this name, if it ran to its end or was refused."""
        ended = (row for row in self.rows if row["status"] in (Status.OK, Status.INCOMPATIBLE))
        return next((row for row in ended if row["name"] == name), None)

    def found(self, words: str) -> Row | None:
        """The point of these words, if it ran to its end."""
        fitting = (row for row in self.rows if self.words(row) == words and row["status"] == Status.OK)
        return next(fitting, None)


def key_of(word: str) -> str:
    return word.partition("=")[0]


def point_words(row: Row) -> list[str]:
    """After the program's name."""
    return shlex.split(row["provenance"]["command"])[2:]


def keep(folder: Path, results: Path, before: str = "") -> Path:
    """Keeps a finished sweep in `results`, the folder of a device; returns its file.

    Args:
        before: what stood before the command, such as "taskset -c 1 env OMP_NUM_THREADS=1".

    Raises:
        Refused: the folder holds no sweep, or its points aren't of one model.
    """
    rows, note = table.collect(folder), folder / "multirun.yaml"
    if not rows or not note.is_file():
        raise Refused(f"{folder} holds no sweep: name the folder that a sweep has left")
    if len({row["choices"]["model"] for row in rows}) > 1:
        raise Refused(f"{folder} holds several models: keep one sweep for each")
    words = _what(OmegaConf.load(note).hydra.overrides.task)
    points = {row["id"]: row["name"] for row in rows}
    kept = [stripped(row, points) for row in rows]
    sweep = Sweep(shlex.join([*shlex.split(before), "python", "train.py", *words]), kept)
    return write(results / FOLDER / f"{sweep.name}_{sweep.model}.jsonl", sweep)


def write(path: Path, sweep: Sweep) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(f"{to_json(line)}\n" for line in ({"command": sweep.command}, *sweep.rows)))
    return path


def stripped(row: Row, points: Mapping[str, str]) -> Row:
    """What a reader of the figures needs: no paths, of the plan its sums, no losses of each step.

    Args:
        points: the names of the sweep's points by their ids, which are also their folders.
    """
    kept = {key: value for key, value in row.items() if key not in WITHOUT}
    plan = row["plan"] and {key: row["plan"].get(key) for key in KEPT_PLAN}
    config = {key: row["config"][key] for key in KEPT_CONFIG if key in row["config"]}
    fidelity = row["fidelity"] and {key: value for key, value in row["fidelity"].items() if key not in OF_STEPS}
    choices = {group: option for group, option in row["choices"].items() if group != "logger"}
    command = shlex.join(["python", "train.py", *(linked(word, points) for word in _what(point_words(row)))])
    provenance = {**row["provenance"], "command": command}
    about = {"choices": choices, "config": config, "plan": plan, "fidelity": fidelity, "provenance": provenance}
    return {**kept, **about}


def linked(word: str, points: Mapping[str, str]) -> str:
    """The word; if its value is the folder of a point, the point's name instead."""
    key, _, value = word.partition("=")
    names = [points[part] for part in Path(value.strip("'\"")).parts if part in points]
    return f"{key}=point:{names[-1]}" if names else word


def _what(words: Sequence[str]) -> list[str]:
    return [word for word in words if key_of(word) not in OF_THE_PLACE]


def read(path: Path) -> Sweep:
    """What `keep` has kept."""
    head, *rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return Sweep(head["command"], [merge(empty_row(), row) for row in rows])


def sweeps(results: Path) -> dict[str, dict[str, dict[str, Sweep]]]:
    """Every sweep that is kept: device -> model -> preset -> sweep. The Transformer comes first."""
    found: dict[str, dict[str, dict[str, Sweep]]] = {}
    for path in sorted(results.glob(f"*/{FOLDER}/*.jsonl")):
        sweep = read(path)
        found.setdefault(path.parents[1].name, {}).setdefault(sweep.model, {})[sweep.name] = sweep
    return {device: dict(sorted(models.items(), reverse=True)) for device, models in found.items()}
