"""The row: what is known about a point, kept as strict JSON in `result.json`. Needs no torch.

A row is a plain dict with every key of `empty_row`. The point's first rank writes it, or who
follows the point if that rank has died; always as a whole, so that a reader never sees half a row.
"""

from __future__ import annotations

import copy
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from lowvram.config.secret import without_secrets
from lowvram.config.texts import shortened
from lowvram.core.kind import Kind
from lowvram.results.files.durable import write_text
from lowvram.results.files.regular import LONG_BYTES, Irregular, read_regular
from lowvram.results.files.sealed import Damaged, opened, sealed
from lowvram.results.metrics import GIB
from lowvram.results.row_fields import empty_fields, fault
from lowvram.results.shown import shown

Row = dict[str, Any]

SCHEMA = 1
FILE_NAME = "result.json"
LONGEST_FAULT = 400  # characters of a message about a damaged file
MIB = 2**20
KINDS = tuple(kind.value for kind in Kind)
LEAST_BEYOND_BYTES, LEAST_BEYOND_SHARE = 32 * MIB, 0.1  # less memory than this beyond tensors isn't mentioned
_HELD_MEMORY = "another process held"


class Status(StrEnum):
    """How a point ended, whether a re-run skips it, and the exit codes that follow."""

    def __new__(cls, word: str, is_final: bool, exit_single: int, exit_sweep: int) -> Status:
        status = str.__new__(cls, word)
        status._value_ = word
        status.is_final = is_final
        status.exit_single = exit_single
        status.exit_sweep = exit_sweep
        return status

    is_final: bool
    exit_single: int
    exit_sweep: int

    OK = "ok", True, 0, 0
    OOM = "oom", True, 1, 0
    INCOMPATIBLE = "incompatible", True, 3, 0
    NONFINITE = "nonfinite", True, 1, 1
    TIMEOUT = "timeout", False, 1, 1
    KILLED = "killed", False, 1, 1
    ERROR = "error", False, 1, 1
    INTERRUPTED = "interrupted", False, 75, 75
    SKIPPED = "skipped", False, 1, 0


def empty_row() -> Row:
    """A row in which nothing is known yet: it has every key, and every value is null."""
    return empty_fields() | {"schema": SCHEMA}


def merge(row: Row, fragment: Mapping[str, Any]) -> Row:
    """A new row: `fragment` over `row`, mapping by mapping; lists and numbers are replaced.

    Raises KeyError for a top-level key that the schema doesn't know, TypeError where the fragment
    would replace a section such as `memory` by something else.
    """
    schema = empty_row()
    for key, value in fragment.items():
        if key not in schema:
            sections = ", ".join(schema)
            raise KeyError(
                f"a row has no key {key!r}: use one of {sections}, or list its figures in results/metrics.py"
            )
        if isinstance(schema[key], dict) and not isinstance(value, Mapping):
            raise TypeError(f"row[{key!r}] is a mapping, it can't become {value!r}")
    return _merged(row, fragment)


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(dict(old))
    for key, value in new.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if both else copy.deepcopy(value)
    return merged


def read(folder: str | os.PathLike[str]) -> Row | None:
    """The row of a point's folder; None when there is none or, with one warning, when the file isn't a whole row."""
    path = Path(folder) / FILE_NAME
    try:
        return parsed(opened(read_regular(path, LONG_BYTES).decode()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Irregular as error:
        why = str(error.strerror)
    except (ValueError, RecursionError) as error:
        why = str(error) if isinstance(error, NoRow | Damaged) else "it is no JSON, so it was damaged, or another's"
    if path.absolute() not in _reported:
        _reported.add(path.absolute())
        print(shown(f"{path} is ignored, as it was damaged, or isn't a row that lowvram wrote: {why}"), file=sys.stderr)
    return None


def group_in(sweep: Path) -> str | None:
    """The group, at the loggers, of the points that a sweep's folder holds so far."""
    found = (row["logged"]["group"] for path in sorted(sweep.glob(f"*/{FILE_NAME}")) if (row := read(path.parent)))
    return next(filter(None, found), None)


_reported: set[Path] = set()  # files that a warning has named


class NoRow(ValueError):
    """A JSON value that is no row; the message says why."""


def parsed(text: str) -> Row:
    """A row that was written as JSON.

    Raises:
        ValueError: it isn't JSON, or (NoRow) not a row.
    """
    stored = json.loads(text, parse_constant=lambda _: None)
    if not isinstance(stored, dict) or stored.get("schema") != SCHEMA:
        schema = stored.get("schema") if isinstance(stored, dict) else None
        raise NoRow(f"schema={schema!r}: must be {SCHEMA}")
    row = _merged(empty_row(), stored)
    if wrong := fault(row, tuple(Status)):
        raise NoRow(shortened(wrong, LONGEST_FAULT))
    return row


def write(folder: str | os.PathLike[str], row: Row, name: str = FILE_NAME) -> None:
    """Writes `result.json`, or another file, in one move."""
    write_text(Path(folder) / name, sealed(to_json(row, indent=1), "\n "))


def to_json(value: Any, indent: int | None = None) -> str:
    """Strict JSON without secrets: NaN and infinity, which JSON doesn't have, become null."""
    return json.dumps(_finite(without_secrets(value)), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def is_final(row: Row) -> bool:
    """Whether a re-run skips this point.

    Running out of memory is final, except when another process held memory of the device meanwhile.
    """
    if row["status"] is None:
        return False
    status = Status(row["status"])
    crowded = status is Status.OOM and _HELD_MEMORY in (row["disturbed"] or "")
    return status.is_final and not crowded


def is_missing(row: Row) -> bool:
    """Whether a re-run may add a result. (A skipped point would only be skipped again.)"""
    return not is_final(row) and row["status"] != Status.SKIPPED


def held_by_another_process(num_bytes: int) -> str:
    """The `disturbed` reason that `is_final` understands."""
    return f"{_HELD_MEMORY} {size_text(num_bytes)} of the device's memory"


def exit_code(rows: Iterable[Row], sweep: bool) -> int:
    """The exit code of the program: that of the worst row, 0 when nothing ran.

    In a sweep, rows that ran out of memory or don't fit together are results, not failures;
    it exits with 3 only when no configuration at all could run.
    """
    statuses = [Status(row["status"]) for row in rows]
    if not sweep:
        return max((status.exit_single for status in statuses), default=0)
    if statuses and all(status is Status.INCOMPATIBLE for status in statuses):
        return Status.INCOMPATIBLE.exit_single
    return max((status.exit_sweep for status in statuses), default=0)


def attempts_text(row: Row) -> str | None:
    """The number of parts with which a batch ran after attempts with fewer; None if there were no attempts."""
    fewer = [str(attempt["parts"]) for attempt in row["attempts"] or ()]
    if not fewer:
        return None
    parts = (row["config"].get("accum") or {}).get("parts")
    return f"accum.parts={parts}, after running out of memory with {', '.join(fewer)}"


def beyond_tensors_text(row: Row) -> str | None:
    """What was allocated in a step beyond its tensors; None if it is small, or not known."""
    beyond_bytes, peak_bytes = row["memory"]["beyond_tensors_bytes"], row["memory"]["peak_bytes"]
    if not beyond_bytes or not peak_bytes or beyond_bytes < max(LEAST_BEYOND_BYTES, LEAST_BEYOND_SHARE * peak_bytes):
        return None
    return f"{size_text(beyond_bytes)} more than its tensors were allocated, by kernels, libraries or other threads"


def reruns_text(row: Row) -> str | None:
    """The results of the point's other measurements; None if it was measured once."""
    others = row["reruns"]
    if not others:
        return None
    texts = [
        rerun["reason"] or rerun["status"] if rerun["step_ms_p50"] is None else _rerun_text(rerun) for rerun in others
    ]
    return f"measured {len(others) + 1} times; the others: {', '.join(texts)}"


def _rerun_text(rerun: Mapping[str, Any]) -> str:
    return f"{rerun['step_ms_p50']:.4g} ms a step ({rerun['disturbed']})"


def size_text(num_bytes: float) -> str:
    """Bytes for a reader: "0.123 GiB"; "3.21 MiB" below 0.01 GiB."""
    if num_bytes >= GIB // 100:
        return f"{num_bytes / GIB:.3f} GiB"
    return f"{num_bytes / MIB:.2f} MiB"
