"""The list of figures: what it names is there, and a new entry is told everywhere."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from lowvram.cli import objective
from lowvram.config.settings import GROUPS
from lowvram.results import columns, csv_file, metrics, row_fields, table, terminal
from lowvram.results.csv_file import to_csv
from lowvram.results.loggers import logger
from lowvram.results.loggers.wandb_sweep import columns as sweep_columns
from lowvram.results.metrics import (
    BY_IMPORTANCE,
    BYTES,
    GIB,
    METRICS,
    Better,
    Digits,
    Metric,
    PowersOfTen,
    Shown,
    number_texts,
)
from lowvram.results.printed_table import to_markdown
from lowvram.results.report.data import Entry, evidence
from lowvram.results.report.report import page
from lowvram.results.row import MIB, Row, empty_row, merge, parsed, to_json
from lowvram.results.row_fields import NUMBER
from scripts.pages import doc_shapes
from tests.synthetic import point

READERS = (row_fields, columns, table, csv_file, terminal, logger, doc_shapes, objective)
OPEN_SECTIONS = ("plan", "fidelity", "memory.by_kind_max")  # whose keys an empty row doesn't tell
SWAPPED = Metric(
    "memory.swapped_bytes",
    "swapped {unit}",
    BYTES,
    better=Better.SMALLER,
    logger_name="memory/swapped_gib",
    shown_in=Shown.TABLE | Shown.SUMMARY,
)
ENERGY = Metric(
    "energy.joule_per_step",
    "joule per step",
    "J",
    better=Better.SMALLER,
    logger_name="energy/joule_per_step",
    shown_in=Shown.TABLE | Shown.SUMMARY,
)


def test_every_figure_is_in_the_row() -> None:
    empty = empty_row()
    for metric in METRICS:
        section, _, name = metric.path.rpartition(".")
        assert section in OPEN_SECTIONS or name in empty[section], metric.path


def test_no_two_figures_have_the_same_name() -> None:
    for name in ("path", "title", "logger_name", "csv_name"):
        names = [value for metric in METRICS if (value := getattr(metric, name))]
        assert len(names) == len(set(names)), name


def test_no_figure_has_the_name_of_a_group() -> None:
    """In table.csv and rows.jsonl both are columns."""
    assert {figure.csv_name for figure in METRICS}.isdisjoint(GROUPS)


def test_columns_that_are_important_are_figures_or_columns_of_words() -> None:
    words = {"status", "memory source", "fits", "disturbed", "p05-p95", "command"}
    assert set(BY_IMPORTANCE) <= {metric.path for metric in METRICS if metric.shown_in} | words
    assert len(BY_IMPORTANCE) == len(set(BY_IMPORTANCE))


def test_sizes_have_bytes_in_the_row_and_gib_in_wandb() -> None:
    for metric in METRICS:
        is_size = metric.path.endswith("_bytes") or "by_kind" in metric.path
        assert metric.is_size == is_size == ("{unit}" in metric.title)
        assert metric.logger_value(GIB) == (1 if is_size else GIB)
        assert not metric.logger_name or metric.logger_name.endswith("_gib") == is_size


@pytest.fixture
def longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list with two figures more."""
    for module in (metrics, *READERS):
        monkeypatch.setattr(module, "METRICS", (*METRICS, SWAPPED, ENERGY))


def measured() -> list[Row]:
    figures = [{"memory": {"swapped_bytes": size * MIB}, "energy": {"joule_per_step": size / 2}} for size in (3, 7)]
    return [merge(point(number, {}, 4.0, name=f"p{number}"), each) for number, each in enumerate(figures)]


@pytest.mark.usefixtures("longer")
def test_a_new_figure_is_in_the_row_from_disk_too() -> None:
    assert empty_row()["memory"]["swapped_bytes"] is None
    assert empty_row()["energy"] == {"joule_per_step": None}
    first = parsed(to_json(measured()[0]))
    assert (first["memory"]["swapped_bytes"], first["energy"]["joule_per_step"]) == (3 * MIB, 1.5)
    with pytest.raises(ValueError, match=rf"memory.swapped_bytes='much': must be {NUMBER.words}"):
        parsed(to_json(merge(measured()[0], {"memory": {"swapped_bytes": "much"}})))


def test_without_its_entry_a_row_refuses_it() -> None:
    with pytest.raises(KeyError, match=r"a row has no key 'energy': .* or list its figures in results/metrics\.py"):
        measured()


@pytest.mark.usefixtures("longer")
def test_a_new_figure_is_a_column_of_tables_and_of_csv() -> None:
    built = table.build(measured())
    swapped, energy = (
        next(c for c in built.columns if c.title == title) for title in ("swapped MiB", "joule per step")
    )
    assert (swapped.texts, swapped.best, swapped.better) == (("3.00", "7.00"), {0}, Better.SMALLER)
    assert energy.values == (1.5, 3.5)
    assert "**3.00**" in to_markdown(built)
    assert "swapped MiB" in table.render(measured(), io.StringIO())
    lines = list(csv.DictReader(io.StringIO(to_csv(measured()))))
    assert [line["swapped_bytes"] for line in lines] == [str(3 * MIB), str(7 * MIB)]
    assert [line["joule_per_step"] for line in lines] == ["1.5", "3.5"]


@pytest.mark.usefixtures("longer")
def test_a_new_figure_is_said_after_a_run() -> None:
    lines = terminal.summary(measured()[0])
    assert any(line.startswith("memory: 4.00 MiB ") and line.endswith(", swapped 3.00 MiB") for line in lines), lines
    assert "energy: joule per step 1.5" in lines


@pytest.mark.usefixtures("longer")
def test_a_sweep_can_optimise_a_new_figure() -> None:
    wanted = objective.Objective.named("energy.joule_per_step")
    assert wanted.directions == ["minimize"]
    assert wanted.values(measured()[1]) == [3.5]


@pytest.mark.usefixtures("longer")
def test_a_new_figure_is_in_wandb() -> None:
    assert logger.final_values(measured()[1])["memory/swapped_gib"] == 7 * MIB / GIB
    assert sweep_columns(measured())["energy/joule_per_step"] == [1.5, 3.5]


@pytest.mark.usefixtures("longer")
def test_a_new_figure_is_in_the_report_and_in_the_docs(tmp_path: Path) -> None:
    shown = evidence([Entry(tmp_path, tmp_path / one["name"], one) for one in measured()])
    (column,) = (column for column in shown["columns"] if column["title"] == "swapped MiB")
    assert (column["values"], column["better"]) == ([3.0, 7.0], -1)
    assert '"swapped MiB"' in page(shown)
    lines = list(doc_shapes.Figures().lines(doc_shapes.Place("figures", "row", "", "", ""), tmp_path))
    names = "| joule per step | `energy.joule_per_step` | `joule_per_step` |"
    assert lines[-1] == f"{names} J | smaller | yes | `energy/joule_per_step` |"


def test_the_best_of_a_column_follows_the_list() -> None:
    rows, values, texts = [point(0, {}), point(1, {})], (1.0, 2.0), ("1", "2")
    found = {better: columns.best_rows(rows, values, texts, better) for better in Better}
    assert found == {Better.SMALLER: {0}, Better.LARGER: {1}, Better.NEITHER: frozenset()}


def test_formats() -> None:
    assert number_texts([0.01234, None, 12.0], 3) == ("0.0123", "", "12.0000")
    assert Digits(4).column([1.0, 2.34567]) == ("1.000", "2.346")
    assert PowersOfTen().column([0.0, None, 1.23e-7]) == ("0", "", "1.2e-07")
    assert (Digits().alone(1.23456), PowersOfTen().alone(0.00123)) == ("1.235", "1.2e-03")
