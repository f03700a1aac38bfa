"""table.csv and rows.jsonl: what pandas reads of several sweeps lines up."""

from __future__ import annotations

import csv
import io
import json

import pytest

from lowvram.config.registry import neutral_options
from lowvram.results.csv_file import records, to_csv, to_json_lines
from lowvram.results.row import GIB, Row, merge
from tests.synthetic import HOSTILE, failed, point

# Names that users' notebooks hold: an entry may be added, but none may change or go.
STABLE = """
name status reason model precision ckpt accum optimizer train.batch_size seed peak_bytes reserved_bytes planned_bytes
planned_reserved_bytes planned_host_bytes least_vram_bytes planned_step_ms parameters_bytes gradients_bytes
optimizer_bytes activations_bytes inputs_bytes host_bytes other_bytes fragmentation_bytes beyond_tensors_bytes
inactive_split_bytes allocation_retries to_host_bytes_per_step to_device_bytes_per_step samples_per_s tokens_per_s mfu
padding step_ms_p50 step_ms_p05 step_ms_p95 copies_waited_ms first_loss last_loss eval_loss accuracy perplexity
gradient_error gradient_cosine loss_gap memory_source fits steps disturbed semantics_changed device_name lowvram torch
git_sha command
"""


def small() -> list[Row]:
    """A sweep over a knob, so small that its table is in MiB."""
    return [point(i, {"ckpt": option}, 20.0) for i, option in enumerate(("none", "every1"))]


def large() -> list[Row]:
    """A sweep over a value, in GiB; one of its points failed."""
    options = [{"_target_": "AdamW", "lr": rate} for rate in (0.001, 0.01)]
    rows = [point(i, {}, 4096.0, config={"optimizer": each}) for i, each in enumerate(options)]
    return [*rows, failed(2, "oom", "out of memory", config={"optimizer": options[0]})]


def read(rows: list[Row]) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(to_csv(rows))))


def test_names_never_change() -> None:
    names = list(records(small())[0])
    assert set(STABLE.split()) <= set(names)
    assert set(neutral_options()) <= set(names)
    assert len(names) == len(set(names))


def test_two_sweeps_line_up() -> None:
    """The titles are the same, but for the values that only one has swept; so are the units."""
    one, other = read(small()), read(large())
    assert other[0].keys() - one[0].keys() == {"optimizer.lr"}
    assert not one[0].keys() - other[0].keys()
    assert [int(line["peak_bytes"]) for line in [*one, *other[:2]]] == [
        row["memory"]["peak_bytes"] for row in [*small(), *large()[:2]]
    ]
    assert [line["ckpt"] for line in one] == ["none", "every1"]
    assert [line["optimizer.lr"] for line in other] == ["0.001", "0.01", "0.001"]
    assert [line["optimizer"] for line in other] == ["adamw"] * 3
    assert (other[2]["status"], other[2]["reason"], other[2]["peak_bytes"]) == ("oom", "out of memory", "")


def test_pandas_joins_them() -> None:
    pandas = pytest.importorskip("pandas")
    joined = pandas.concat([pandas.read_csv(io.StringIO(to_csv(rows))) for rows in (small(), large())])
    assert joined["peak_bytes"].max() == 4 * GIB
    assert joined["optimizer.lr"].isna().sum() == 2
    assert sorted(joined["ckpt"].unique()) == ["every1", "none"]
    lines = pandas.concat(
        [pandas.read_json(io.StringIO(to_json_lines(rows)), lines=True) for rows in (small(), large())]
    )
    assert lines["peak_bytes"].max() == 4 * GIB
    assert [name for name in joined.columns if name not in lines.columns] == []


def test_numbers_are_in_full_and_text_is_safe() -> None:
    row = merge(small()[0], {"name": HOSTILE, "time": {"step_ms_p50": 0.1234567890123}, "reason": "=1+1"})
    (line,) = read([row])
    assert float(line["step_ms_p50"]) == 0.1234567890123
    assert line["reason"] == "'=1+1"
    assert "\u2028" not in line["name"]


def test_scores_of_a_task_of_the_users_have_columns_too() -> None:
    rows = [merge(row, {"eval": {"accuracy": 0.5, "f1": 0.25}}) for row in small()]
    assert (read(rows)[0]["accuracy"], read(rows)[0]["eval.f1"]) == ("0.5", "0.25")


def test_values_of_lists_and_of_nothing() -> None:
    values = ([0.9, 0.99], None)
    rows = [point(i, {}, config={"optimizer": {"betas": each}}) for i, each in enumerate(values)]
    assert [line["optimizer.betas"] for line in read(rows)] == ["[0.9, 0.99]", ""]


def test_a_line_of_json_also_has_the_whole_row() -> None:
    lines = [json.loads(line) for line in to_json_lines(small()).splitlines()]
    assert [line["row"] for line in lines] == small()
    assert lines[1]["ckpt"] == "every1"


def test_without_rows_there_is_no_line() -> None:
    assert to_json_lines([]) == ""
    assert to_csv([]).strip() == ""
