"""A W&B run for a whole sweep, beside those of its points, with their table and the report's figures.

The table's columns are those of the points' runs: `choice.*`, whatever else differs, and the names of the metrics.
Needs no torch; the figures need matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lowvram.config.parent_settings import logger_settings
from lowvram.config.secret import without_secrets
from lowvram.results.ablation import ablations
from lowvram.results.loggers.logger import LoggedRun, final_values, reason
from lowvram.results.loggers.wandb import WandbRun
from lowvram.results.report.data import Entry, entries, evidence
from lowvram.results.report.report import FIGURES
from lowvram.results.row import Row, Status, empty_row, group_in, merge
from lowvram.results.table import label

FOLDER = "wandb_table"  # in the sweep's folder, beside the points: one command uploads them all
KIND = "sweep"
TABLE = "sweep/table"
FIGURE = "figures"

Cells = list[float | str | None]


def record(folder: Path, logger_cfg: Mapping[str, Any]) -> list[str]:
    """Records the sweep in `folder` as a run of its own, in the group of its points. Nothing here raises.

    Returns:
        What to tell the user: where it is online, and what could not be recorded.
    """
    settings, all_entries = logger_settings(logger_cfg), entries([folder])
    if not settings.wandb or all(entry.row["choices"].get("mode") == "plan" for entry in all_entries):
        return []  # plans are not recorded
    try:
        group = group_in(folder) or folder.name
        (folder / FOLDER).mkdir(exist_ok=True)
        run = WandbRun.start(LoggedRun(folder / FOLDER, f"{group} table", group, KIND, settings))
        if run is None:
            _forget(folder / FOLDER)
            return []
        figures, problem = _figures(folder, all_entries)
        run.show({TABLE: columns([entry.row for entry in all_entries])}, figures)
        run.finish(merge(empty_row(), {"status": Status.OK.value}))
    except Exception as error:  # such as a full disk
        return [f"W&B has no table of this sweep: {reason(error)}"]
    return [*filter(None, [problem]), *run.notes]


def columns(rows: Sequence[Row]) -> dict[str, Cells]:
    """The table, column by column; those without a value are left out."""
    about = [
        {"name": row["logged"]["name"] or label(row), "status": row["status"], "reason": row["reason"]} for row in rows
    ]
    differing = [{name: settings[name] for name in settings if "." in name} for settings in ablations(rows)]
    notes = [{key: row[key] for key in ("semantics_changed", "disturbed")} for row in rows]
    commands = [{"command": row["provenance"]["command"]} for row in rows]
    choices = [{f"choice.{group}": option for group, option in row["choices"].items()} for row in rows]
    parts = zip(about, choices, differing, map(final_values, rows), notes, commands, strict=True)
    joined = [{key: value for part in line for key, value in part.items()} for line in parts]
    lines: list[dict[str, Any]] = without_secrets(joined)
    names = dict.fromkeys(name for line in lines for name in line)
    cells = {name: [line.get(name) for line in lines] for name in names}
    return {name: values for name, values in cells.items() if any(value is not None for value in values)}


def _figures(folder: Path, all_entries: Sequence[Entry]) -> tuple[dict[str, Path], str | None]:
    """Name -> PNG, as `python -m lowvram.report --png` makes them; or why there are none."""
    from lowvram.results.report.figures import save_figures

    try:
        paths = save_figures(folder / FIGURES, evidence(all_entries))
    except Exception as error:
        return {}, f"W&B has no figures of this sweep: {reason(error)}"
    return {f"{FIGURE}/{path.stem}": path for path in paths}, None


def _forget(folder: Path) -> None:
    """Remove the folder of a run that recorded nothing, unless it holds files."""
    if not any(folder.iterdir()):
        folder.rmdir()
