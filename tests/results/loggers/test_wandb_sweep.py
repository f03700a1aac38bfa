"""W&B at a sweep's end: what the table and the points hold is read back with W&B's own command."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowvram.results import row as rows
from lowvram.results.loggers.logger import final_values
from lowvram.results.loggers.wandb_sweep import FOLDER, TABLE, columns, record
from lowvram.results.row import Row, merge
from tests.calls import TINY, Outcome
from tests.offline import records_of, summary_of
from tests.synthetic import failed, leave, point

pytestmark = pytest.mark.medium

Call = Callable[..., Outcome]

LOGGER = {"wandb": True, "project": "lowvram-tests"}
POINTS = [point(0, {}), point(1, {"precision": "bf16"}), failed(2, "oom", "too large")]


def part_of(folder: Path) -> Path:
    """Of the one run below."""
    (part,) = folder.glob("wandb/offline-run-*")
    return part


def logged(records: list[dict[str, Any]]) -> dict[str, Any]:
    """What was logged in one step."""
    (item,) = [record["history"]["item"] for record in records if record["type"] == "history"]
    return item


def table_of(part: Path, item: dict[str, Any]) -> dict[str, list[Any]]:
    """The table that the run shows, column by column."""
    assert item[f"{TABLE}._type"] == "table-file"
    found = json.loads((part / "files" / item[f"{TABLE}.path"]).read_text())
    assert (item[f"{TABLE}.ncols"], item[f"{TABLE}.nrows"]) == (len(found["columns"]), len(found["data"]))
    return dict(zip(found["columns"], map(list, zip(*found["data"], strict=True)), strict=True))


def test_columns_are_those_of_the_points_runs() -> None:
    found = columns(POINTS)
    assert found["name"] == ["baseline", "bf16", "oom"]
    assert found["choice.precision"] == ["fp32", "bf16", "fp8"]
    assert found["reason"] == [None, None, "too large"]
    wanted = {*(f"choice.{group}" for group in POINTS[0]["choices"]), *final_values(POINTS[0])}
    assert wanted <= set(found)
    assert "disturbed" not in found
    assert {len(cells) for cells in found.values()} == {len(POINTS)}


def test_what_differs_beside_the_options_is_a_column_and_secrets_are_none() -> None:
    configs = [{"data": {"hf_token": token}, "train": {"batch_size": size}} for token, size in (("a", 8), ("b", 16))]
    found = columns([merge(point(i, {}), {"config": config}) for i, config in enumerate(configs)])
    assert found["train.batch_size"] == ["8", "16"]
    assert set(found["data.hf_token"]) == {"<refused>"}


def test_the_table_and_the_figures_are_a_run_in_the_group_of_the_sweep(
    without_account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = without_account.parent / "a.png"
    draw(drawn)
    monkeypatch.setattr("lowvram.results.report.figures.save_figures", lambda *_: [drawn])
    assert record(leave(without_account, POINTS), LOGGER) == []
    part = part_of(without_account / FOLDER)
    records = records_of(part)
    item = logged(records)
    assert table_of(part, item) == columns(POINTS)
    assert item["figures/a._type"] == "image-file"
    assert (part / "files" / item["figures/a.path"]).read_bytes() == drawn.read_bytes()
    (run,) = [record["run"] for record in records if record["type"] == "run"]
    assert (run["run_group"], run["job_type"]) == (without_account.name, "sweep")
    (artifact,) = [record["artifact"] for record in records if record["type"] == "artifact"]
    waiting = Path(artifact["manifest"]["contents"][0]["local_path"])
    assert waiting.is_relative_to(without_account)  # all that is uploaded later lies in the sweep's folder


def draw(path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (8, 8)).save(path)


@pytest.mark.slow
def test_a_longer_sweep_goes_on_with_its_run(without_account: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowvram.results.report.figures.save_figures", lambda *_: [])
    for row in POINTS[:2]:
        record(leave(without_account, [row]), LOGGER)
    first, second = sorted(
        (without_account / FOLDER).glob("wandb/offline-run-*"), key=lambda part: part.stat().st_mtime
    )
    parts = [(part, records_of(part)) for part in (first, second)]
    ids = {record["run"]["run_id"] for _, records in parts for record in records if record["type"] == "run"}
    assert len(ids) == 1
    assert [len(table_of(part, logged(records))["name"]) for part, records in parts] == [1, 2]


def test_without_matplotlib_there_is_a_table_and_a_sentence(
    without_account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    (said,) = record(leave(without_account, POINTS), LOGGER)
    assert said.startswith("W&B has no figures of this sweep: ")
    assert said.endswith("pip install 'lowvram[report]'")
    part = part_of(without_account / FOLDER)
    assert table_of(part, logged(records_of(part))) == columns(POINTS)


@pytest.mark.parametrize("logger", [LOGGER | {"wandb": False}, LOGGER])
def test_nothing_is_left_where_nothing_is_recorded(
    without_account: Path, monkeypatch: pytest.MonkeyPatch, logger: dict[str, Any]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert record(leave(without_account, POINTS), logger) == []
    assert not (without_account / FOLDER).exists()
    assert not (without_account / "figures").exists()


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    folder = leave(tmp_path, POINTS)
    (folder / FOLDER).write_text("in the way")
    (said,) = record(folder, LOGGER)
    assert said.startswith("W&B has no table of this sweep: ")


def test_plans_are_not_recorded(without_account: Path) -> None:
    plans: list[Row] = [merge(point(i, {}), {"choices": {"mode": "plan"}}) for i in range(2)]
    assert record(leave(without_account, plans), LOGGER) == []
    assert not (without_account / FOLDER).exists()


@pytest.mark.slow
def test_an_offline_sweep_read_back_holds_every_column(
    call: Call, without_account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowvram.results.report.figures.DOTS_PER_INCH", 20)  # drawn in a fraction of the time
    words = [word for word in TINY if word != "logger=none"]
    short = ("mode=measure", "measure.steps=1", "measure.warmup_steps=1", "train.batch_size=2,4")
    outcome = call("-m", *words, *short)
    assert outcome.code == 0, outcome.said()
    assert "to upload: " in outcome.out
    (table,) = outcome.cwd.glob(f"outputs/sweeps/*/*/{FOLDER}")
    part = part_of(table)
    item = logged(records_of(part))
    found = table_of(part, item)
    for number, folder in enumerate(outcome.folders):
        row, run = rows.read(folder), summary_of(part_of(folder))
        assert row is not None
        told = {**{f"choice.{group}": option for group, option in row["choices"].items()}, **final_values(row)}
        assert {name: cells[number] for name, cells in found.items() if name in told} == told
        assert run["config"]["choice"] == row["choices"]
        assert run["summary"].items() >= final_values(row).items()
        assert run["name"] == found["name"][number] == row["logged"]["name"]
    assert found["train.batch_size"] == ["2", "4"]
    figures = {key.partition(".")[0] for key in item if key.startswith("figures/")}
    assert "figures/memory_and_speed" in figures
