"""`table.csv` and `rows.jsonl`: the rows of a sweep as flat records, for pandas and spreadsheets. Needs no torch.

A column means the same in every sweep, under the same name and in the same unit, so that the tables of several sweeps
can be put below each other. Numbers are in full, sizes in bytes.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from lowvram.results.columns import other_scores
from lowvram.results.differing import leaves, varying_names
from lowvram.results.metrics import METRICS
from lowvram.results.row import Row, to_json
from lowvram.results.row_fields import at
from lowvram.results.shown import cell, shown

FILE_NAME = "table.csv"
ALWAYS = ("train.batch_size", "seed")  # values that have a column even where they weren't swept
Record = dict[str, Any]


def records(rows: Sequence[Row]) -> list[Record]:
    """One record for each row, all with the same keys: the option of each group, the values that were swept, every
    figure, and what a reader must know of them."""
    groups = dict.fromkeys(group for row in rows for group in row["choices"])
    keys = dict.fromkeys([*ALWAYS, *(name for name in varying_names(rows) if name not in groups)])
    scores = other_scores(rows)
    return [
        {
            **{key: row[key] for key in ("name", "status", "reason")},
            **{group: row["choices"].get(group) for group in groups},
            **_values(row, list(keys)),
            **{metric.csv_name: at(row, metric.path) for metric in METRICS},
            **{f"eval.{name}": row["eval"].get(name) for name in scores},
            **_about(row),
        }
        for row in rows
    ]


def _values(row: Row, keys: Sequence[str]) -> Record:
    """The values of the configuration under dotted keys; lists as JSON."""
    known = dict(leaves(row["config"]))
    return {key: json.dumps(value) if isinstance(value := known.get(key), list) else value for key in keys}


def _about(row: Row) -> Record:
    """How the figures came about, and what disturbed them."""
    where = row["provenance"]
    return {
        "memory_source": row["memory"]["source"],
        "fits": (row["plan"] or {}).get("fits"),
        "steps": row["time"]["steps"],
        **{key: row[key] for key in ("disturbed", "semantics_changed")},
        **{key: where[key] for key in ("started", "device_name", "lowvram", "torch", "git_sha", "command")},
    }


def to_csv(rows: Sequence[Row]) -> str:
    """The records with a line of titles; an unknown value is an empty cell."""
    lines = records(rows)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_cell(title) for title in (lines[0] if lines else ()))
    writer.writerows([_cell(value) for value in line.values()] for line in lines)
    return text.getvalue()


def _cell(value: Any) -> Any:
    """Text safe for spreadsheets and without secrets."""
    return cell(shown(value)) if isinstance(value, str) else value


def to_json_lines(rows: Sequence[Row]) -> str:
    """The records as JSON, one a line, each with its whole row under `row`."""
    return "".join(f"{to_json({**record, 'row': row})}\n" for record, row in zip(records(rows), rows, strict=True))
