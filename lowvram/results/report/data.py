"""What a report shows: the rows of one or more sweeps as one plain value, ready for JSON. Needs no torch.

Units: memory in the unit named by `unit`, speed in `speed_unit` per second, times in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from lowvram.results import memory_over_step, table
from lowvram.results.ablation import (
    Settings,
    ablations,
    baseline,
    effects,
    frontier,
    memory_bytes,
    samples_per_s,
    waterfall,
)
from lowvram.results.columns import Column, value_at, words_column
from lowvram.results.metric_lines import FILE_NAME as LOG_FILE
from lowvram.results.metrics import importance
from lowvram.results.report import heading
from lowvram.results.report.batch_size import batch_sizes
from lowvram.results.report.curves import curve
from lowvram.results.row import KINDS, Row
from lowvram.results.shown import shown

Evidence = dict[str, Any]
PEAK_KINDS = tuple(kind for kind in KINDS if kind != "host")  # the host's is no part of the peak


@dataclass(frozen=True)
class Entry:
    """A row, with the folders of its sweep and its point."""

    sweep: Path
    folder: Path
    row: Row


def entries(folders: Sequence[Path]) -> list[Entry]:
    """The points of all sweeps, in the order of the folders."""
    return [
        Entry(folder, point, row)
        for folder in dict.fromkeys(path.resolve() for path in folders)
        for point, row in table.collect_with_folders(folder)
    ]


def evidence(all_entries: Sequence[Entry]) -> Evidence:
    """All data of the report, of at least one point."""
    rows = [entry.row for entry in all_entries]
    unit, unit_bytes = table.memory_unit(rows)
    differing, reference = ablations(rows), baseline(rows)
    has_tokens = any(value_at(row, "throughput.tokens_per_s") for row in rows)
    is_plan = all(row["choices"].get("mode") == "plan" for row in rows)
    sweeps = list(dict.fromkeys(entry.sweep for entry in all_entries))
    points = [_point(entry, each, unit_bytes, has_tokens) for entry, each in zip(all_entries, differing, strict=True)]
    return escaped(
        {
            "title": heading.title(differing) or table.label(rows[0]),
            "sweeps": [_sweep(sweep, [entry.row for entry in all_entries if entry.sweep == sweep]) for sweep in sweeps],
            "about": _about(rows),
            "unit": unit,
            "memory_title": f"{'planned' if is_plan else 'peak'} memory",
            "memory_source": _source(rows),
            "speed_unit": "tokens" if has_tokens else "samples",
            "kinds": PEAK_KINDS,
            "baseline": reference,
            "points": points,
            "frontier": frontier(rows),
            "effects": [vars(effect) for effect in effects(rows, differing, reference)],
            "waterfall": waterfall(rows, differing),
            "batch_sizes": batch_sizes(rows, differing),
            "columns": [_column(column) for column in _columns(all_entries, differing)],
            "notes": [*table.build(rows).notes, *_damages(points)],
        }
    )


def escaped(value: Any) -> Any:
    """The same with every text safe to be shown: whoever wrote a row may have written anything into it."""
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, Mapping):
        return {escaped(name): escaped(item) for name, item in value.items()}
    return [escaped(item) for item in value] if isinstance(value, list | tuple) else value


def _damages(points: Sequence[Evidence]) -> list[str]:
    """A note for each point whose log has damaged lines."""
    damaged = ((point["name"], point["curve"]["num_damaged"]) for point in points)
    return [f"{name}: {number} damaged lines of {LOG_FILE} are left out" for name, number in damaged if number]


def _sweep(folder: Path, rows: Sequence[Row]) -> dict[str, str]:
    """The name of a sweep's folder, when it ran, and its command."""
    return {"name": shown(folder.name), "date": heading.date(rows), "command": heading.command(rows)}


def _about(rows: Sequence[Row]) -> list[str]:
    """The number of points, models, devices and versions; each once."""
    where = [row["provenance"] for row in rows]
    models = [f"model={model}" for model in dict.fromkeys(row["choices"].get("model") for row in rows) if model]
    devices = [each["device_name"] for each in where]
    versions = [f"{name} {each[name]}" for name in ("lowvram", "torch") for each in where if each[name]]
    number = f"{len(rows)} point{'s' * (len(rows) > 1)}"
    return list(dict.fromkeys(str(one) for one in (number, *models, *devices, *versions) if one))


def _source(rows: Sequence[Row]) -> str:
    """How the peaks were measured."""
    return ", ".join(table.peak_sources(rows))


def _point(entry: Entry, differing: Settings, unit_bytes: int, has_tokens: bool) -> Evidence:
    """The data of one point, for all figures."""
    row = entry.row
    speed, per_sample = samples_per_s(row), _tokens_per_sample(row) if has_tokens else 1.0
    batch_size = (row["config"].get("train") or {}).get("batch_size")
    kinds = row["memory"]["by_kind"] or (row["plan"] or {}).get("by_kind" if _is_plan(row) else "")
    return {
        "name": table.label(row),
        "sweep": shown(entry.sweep.name),
        "status": row["status"] or "unfinished",
        "reason": row["reason"] and shown(row["reason"]),
        "command": row["provenance"]["command"] and shown(row["provenance"]["command"]),
        "settings": dict(differing),
        "memory": _scaled(memory_bytes(row), unit_bytes),
        "planned": None if _is_plan(row) else _scaled(value_at(row, "plan.allocated_bytes"), unit_bytes),
        "by_kind": kinds and [_scaled(kinds.get(kind) or 0, unit_bytes) for kind in PEAK_KINDS],
        "by_kind_reason": row["memory"]["by_kind_reason"],
        "disturbed": row["disturbed"] and shown(row["disturbed"]),
        "speed": speed and per_sample and speed * per_sample,
        "speed_range": _speed_range(row, speed and per_sample and speed * per_sample),
        "loss": value_at(row, "loss.eval"),
        "num_steps": value_at(row, "time.steps"),
        "gradient_error": value_at(row, "fidelity.gradient_error"),
        "loss_gap": value_at(row, "fidelity.loss_gap"),
        "over_step": kinds and _over_step(entry.folder, unit_bytes),
        "curve": vars(curve(entry.folder, row, per_sample, batch_size)),
    }


def _speed_range(row: Row, speed: float | None) -> list[float] | None:
    """The speeds of a slow and of a fast step, the 95th and the 5th percentile of their times; None for a plan."""
    times = [value_at(row, f"time.step_ms_{name}") for name in ("p50", "p95", "p05")]
    middle, slow, fast = times
    return [speed * middle / slow, speed * middle / fast] if speed and middle and slow and fast else None


def _over_step(folder: Path, unit_bytes: int) -> Evidence | None:
    """The memory of a step: the moments, the stretches of its phases, and the sizes of each kind; one number for a kind
    that stays the same. None if the folder has no such file."""
    moments = memory_over_step.read(folder)
    if moments is None:
        return None
    sizes = {kind: [_scaled(size, unit_bytes) for size in moments.by_kind.get(kind, ())] for kind in PEAK_KINDS}
    stretches = [(phase, list(group)) for phase, group in groupby(enumerate(moments.phases), key=lambda each: each[1])]
    return {
        "events": moments.events,
        "phases": [[shown(phase), group[0][0], group[-1][0]] for phase, group in stretches],
        "sizes": [of[0] if len(set(of)) == 1 else of for of in (sizes[kind] or [0.0] for kind in PEAK_KINDS)],
    }


def _is_plan(row: Row) -> bool:
    return row["choices"].get("mode") == "plan"


def _tokens_per_sample(row: Row) -> float | None:
    """Measured, without padding."""
    samples, tokens = value_at(row, "throughput.samples_per_s"), value_at(row, "throughput.tokens_per_s")
    return tokens / samples if samples and tokens else None


def _scaled(num_bytes: float | None, unit_bytes: int) -> float | None:
    return None if num_bytes is None else float(f"{num_bytes / unit_bytes:.6g}")


def _columns(all_entries: Sequence[Entry], differing: Sequence[Settings]) -> list[Column]:
    """The columns of the table, with the settings that differ and the commands."""
    rows = [entry.row for entry in all_entries]
    name, status, *numbers = table.build(rows).columns
    names = dict.fromkeys(key for each in differing for key in each)
    sweeps = [entry.sweep.name for entry in all_entries]
    columns = [
        name,
        words_column("sweep", sweeps if len({entry.sweep for entry in all_entries}) > 1 else ()),
        status,
        *(words_column(key, (settings.get(key) for settings in differing)) for key in names),
        *numbers,
        words_column("command", (row["provenance"]["command"] for row in rows)),
    ]
    return [column for column in columns if any(column.texts)]


def _column(column: Column) -> Evidence:
    return {
        "title": column.title,
        "rank": importance(column.key),
        "texts": column.texts,
        "values": column.values if column.is_number else None,
        "best": sorted(column.best),
        "better": column.better,
        "is_of_training": column.of_training,
    }
