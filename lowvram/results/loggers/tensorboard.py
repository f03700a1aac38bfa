"""TensorBoard: event files in the run's folder, written by the parent. Needs no torch; imports tensorboard on first
use."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from lowvram.config.errors import Refused
from lowvram.config.secret import without_secrets
from lowvram.results.differing import is_setting, leaves
from lowvram.results.loggers.event_file import EventFile
from lowvram.results.loggers.logger import LoggedRun, Logger, final_values
from lowvram.results.row import Row, Status, to_json

FOLDER = "tensorboard"  # in the run's folder; in it one with the run's name, which TensorBoard's pages show
FINAL = "final"  # the tags of the row's figures, apart from those of the steps


@final
class TensorBoard(Logger):
    """`logger=tensorboard`."""

    title = "TensorBoard"

    @classmethod
    def start(cls, run: LoggedRun) -> TensorBoard:
        earlier = earlier_folder(run.folder)
        try:
            logger = cls(EventFile(earlier or run.folder / FOLDER / folder_name(run.name)))
        except ImportError as error:
            raise Refused(f"it needs pip install 'lowvram[tensorboard]' ({error})") from None
        if earlier is not None:
            logger.go_on(run)
        logger.describe(run)
        return logger

    def __init__(self, file: EventFile) -> None:
        self._file, self._last_step = file, 0

    def go_on(self, run: LoggedRun) -> None:
        self._last_step = run.step
        self._file.forget_after(run.step)

    def describe(self, run: LoggedRun) -> None:
        """The settings as hyperparameters; notes, tags, group, hardware and versions as text."""
        settings = without_secrets(dict(hyperparameters(run.config)))
        self._file.begin_trial(f"{run.name} ({run.folder.name})", settings)
        about = {"name": run.name, "group": run.group, "tags": run.settings.tags, "notes": run.settings.notes}
        self._file.text("about", as_table({**about, **run.config.get("provenance", {})}))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._last_step = step
        self._file.scalars(step, known(values))

    def log_curves(self, section: str, curves: Mapping[str, Sequence[float]]) -> None:
        names = [f"{section}/{name}" for name in curves]
        for number, values in enumerate(zip(*curves.values(), strict=True)):
            self._file.scalars(number, dict(zip(names, values, strict=True)))

    def finish(self, row: Row) -> None:
        values = final_values(row)
        texts = {name: value for name, value in values.items() if isinstance(value, str)}
        numbers = {f"{FINAL}/{name}": value for name, value in values.items() if not isinstance(value, str)}
        self._file.scalars(self._last_step, numbers)
        self._file.text("ended", as_table(texts))
        self._file.end_trial(row["status"] == Status.OK)
        self._file.close()


def earlier_folder(folder: Path) -> Path | None:
    """Where the event files of a run that goes on are; None if it has none."""
    return next((path for path in sorted((folder / FOLDER).glob("*")) if path.is_dir()), None)


def folder_name(name: str) -> str:
    """A run's name as a folder's."""
    return re.sub(r"[^\w.=+@-]", "-", name).strip(".-") or "run"


def known(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


def hyperparameters(config: Mapping[str, Any]) -> Iterator[tuple[str, bool | float | str]]:
    """The choices and values that can change a result, by dotted keys."""
    for key, value in leaves(config):
        if is_setting(key) and not key.startswith("provenance."):
            yield key, value if isinstance(value, bool | int | float | str) else to_json(value)


def as_table(values: Mapping[str, Any]) -> str:
    """A table in Markdown of what is known, without secrets."""
    known = {name: in_cell(value) for name, value in without_secrets(dict(values)).items() if value is not None}
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {cell} |" for name, cell in known.items() if cell)])


def in_cell(value: Any) -> str:
    """A value in a cell of a Markdown table."""
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return " ".join(text.replace("|", "\\|").split())
