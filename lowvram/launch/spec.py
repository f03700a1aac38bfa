"""A point: one full configuration that is to run. Imports no torch.

All that determines its run stands in its folder's `spec.json`, without secrets: whoever starts the run writes the file,
and `python -m lowvram.worker FOLDER` runs what it says.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self, final

from lowvram.config.secret import REFUSED, without_secrets
from lowvram.config.version import __version__
from lowvram.launch.torchrun import Launch
from lowvram.results import row as rows
from lowvram.results.files.durable import write_text
from lowvram.results.files.regular import LONG_BYTES, read_regular
from lowvram.results.files.sealed import opened, sealed
from lowvram.results.row import Row

FILE_NAME = "spec.json"
Config = Mapping[str, Any]
Attempts = list[dict[str, Any]]
Measurement = dict[str, Any]
Hidden = list[tuple[list[str], Any]]  # the values that the file doesn't hold, by their keys
IN_ROW = ("id", "name", "index", "config", "choices", "provenance", "logged", "plan", "attempts", "reruns")


class NoSpec(ValueError):
    """A file that is no specification; the message says why."""


@dataclass(frozen=True)
class PointSpec:
    """One run of a point.

    Attributes:
        name: what was swept, or the run's name.
        index: its place in the sweep.
        config: composed and resolved, with secrets.
        choices: the option of each group.
        sweep: the name of its sweep.
        provenance: the row's field.
        logged: what it is called at its loggers: its name, and the group of runs that belong together.
        plan: the row's field: the memory and time predicted for it.
        attempts: earlier ones, with fewer parts, that ran out of memory: see runs/retry.py.
        reruns: earlier measurements that were disturbed: see runs/retry.py.
        run: the id that its snapshots carry.
        fidelity: for a run of a comparison: see fidelity/worker.py.
    """

    id: str
    name: str
    index: int
    folder: Path
    config: dict[str, Any]
    choices: dict[str, str]
    sweep: str | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    logged: Mapping[str, str | None] = field(default_factory=dict)
    plan: Mapping[str, Any] | None = None
    attempts: Attempts | None = None
    reruns: list[Measurement] | None = None
    is_resumed: bool = False
    run: str | None = None
    fidelity: Mapping[str, Any] | None = None

    def first_row(self) -> Row:
        """The row before anything has run."""
        return rows.merge(rows.empty_row(), without_secrets({name: getattr(self, name) for name in IN_ROW}))

    def write(self) -> None:
        """Write the file as a whole."""
        known = {each.name: getattr(self, each.name) for each in fields(PointSpec) if each.name != "folder"}
        text = json.dumps({"lowvram": __version__, **without_secrets(known)}, indent=1)
        write_text(self.folder / FILE_NAME, sealed(text, "\n "))

    def hidden(self) -> Hidden:
        """What the file doesn't hold of the configuration."""
        return list(differing(self.config, without_secrets(self.config)))

    @classmethod
    def read(cls, folder: Path, hidden: Iterable[tuple[list[str], Any]] = ()) -> Self:
        """The specification in a folder.

        Args:
            hidden: as `hidden` of the one that was written returns them.

        Raises:
            OSError: it can't be read.
            NoSpec: it is damaged, or needs a value that is kept nowhere.
        """
        try:
            known = json.loads(opened(read_regular(folder / FILE_NAME, LONG_BYTES).decode()))
            del known["lowvram"]
            for keys, value in hidden:
                place = known["config"]
                for key in keys[:-1]:
                    place = place[key]
                place[keys[-1]] = value
            spec = cls(folder=folder, **known)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise NoSpec(f"{folder / FILE_NAME} is no specification of a run: {error}") from None
        if missing := next((keys for keys, _ in differing(spec.config, without_refused(spec.config))), None):
            key = ".".join(missing)
            raise NoSpec(f"{key}: its value is a secret, which {FILE_NAME} doesn't hold: start the run with train.py")
        return spec


@final
@dataclass(frozen=True)
class Point(PointSpec):
    """A specification, and what only the parent needs to know.

    Attributes:
        earlier: the row of the run that it continues: see runs/earlier.py.
        launch: this program's rank, if torchrun has started it.
        notes: what was typed and composed, for `.hydra/`.
        locks: descriptors of locked files, which its processes (and no others) keep open, so that the locks last as
            long as any of them lives: see results/files/claim.py.
        fence: a folder and the token that its lease has as long as they may write there: see results/files/lease.py.
    """

    earlier: Row | None = None
    launch: Launch | None = None
    notes: Mapping[str, str] = field(default_factory=dict)
    locks: Sequence[int] = ()
    fence: tuple[str, str] | None = None

    @property
    def first_rank(self) -> int:
        """The lowest rank among the processes that this program has started."""
        return 0 if self.launch is None else self.launch.rank


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


def differing(values: Any, others: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[list[str], Any]]:
    """The values that differ between two mappings of the same form, by their keys."""
    if isinstance(values, Mapping) and isinstance(others, Mapping):
        for key, value in values.items():
            yield from differing(value, others[key], (*keys, key))
    elif values is not others and values != others:  # a NaN differs from itself
        yield [*keys], values


def without_refused(values: Any) -> Any:
    """The same, with null in place of each text that holds a secret's mark."""
    if isinstance(values, Mapping):
        return {key: without_refused(value) for key, value in values.items()}
    return None if REFUSED in str(values) else values
