"""A disturbed point is marked, kept and measured again: at most twice, and never to pick the best."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

import pytest

from lowvram.config.settings import CHILDS_OWN
from lowvram.launch.client import Ending, Event
from lowvram.launch.spec import Point
from lowvram.results.metric_lines import Values, to_line
from lowvram.results.report.report import save
from lowvram.results.row import Row, read
from lowvram.results.table import build, collect
from lowvram.results.terminal import QuietProgress, summary
from lowvram.runs.run import run_point
from tests.calls import TINY, Outcome, history

Measurement = tuple[str | None, float]  # what has disturbed it, ms a step
CONFIG = {
    **{key: {} for key in CHILDS_OWN},
    **dict.fromkeys(("vram", "name", "timeout_s")),
    "seed": 0,
    "accum": {"parts": 1},
    "sharding": {"timeout_s": 60},
    "train": {"batch_size": 1},
    "logger": {},
    "paths": {"outputs": "outputs"},
}


@final
class Scripted:
    """A server whose children find what is written down."""

    disturbs, is_fresh = None, True

    def __init__(self, measurements: Sequence[Measurement | str], untold: Sequence[Values] = ()) -> None:
        self.left, self.untold = list(measurements), list(untold)

    def wait_until_ready(self, order: Any) -> None: ...

    def ask(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {}

    def run(self, point: Point, on_event: Callable[[Event], None], order: Any) -> list[Ending]:
        measurement = self.left.pop(0)
        parts = {"parts": 1, "more_parts": None}
        on_event(
            {
                "event": "begin",
                "step": 0,
                "num_steps": 1,
                "setup_s": 0.0,
                "untold": self.untold,
                "pid": 1,
                **parts,
            }
        )
        if isinstance(measurement, str):
            fields: dict[str, Any] = {"status": measurement, "reason": "planted"}
        else:
            disturbed, ms = measurement
            (point.folder / "metrics.jsonl").write_text(to_line({"step": 1, "loss/train": ms}))
            on_event({"event": "metrics", "step": 1, "values": {"loss/train": ms}, "is_late": True})
            time, throughput = {"step_ms_p50": ms}, {"samples_per_s": 1e3 / ms}
            fields = {"status": "ok", "time": time, "throughput": throughput}
            fields |= {"disturbed": disturbed} if disturbed else {}
        on_event({"event": "row", "rank": 0, "fields": fields})
        return [{"rank": 0, "status": 0, "ended_by": None, "is_stopped": False}]


def measured(folder: Path, *measurements: Measurement | str, reruns: int = 2, mode: str = "measure") -> tuple[Row, int]:
    """The row that is left, and how many measurements were not made."""
    folder.mkdir(exist_ok=True)
    limits = {"reruns": reruns, "fidelity": False}
    config, choices = {**CONFIG, "measure": limits}, {"mode": mode}
    point = Point("id", "name", 0, folder, config, choices, sweep="sweep", provenance={})
    server = Scripted(measurements)
    run_point(point, server, QuietProgress(io.StringIO()), lambda: 0, lambda _: None)  # pyright: ignore[reportArgumentType]
    row = read(folder)
    assert row is not None
    return row, len(server.left)


def test_it_ends_with_the_first_that_nothing_disturbed(tmp_path: Path) -> None:
    row, num_left = measured(tmp_path, ("noise", 5.0), (None, 9.0), (None, 1.0))
    assert num_left == 1
    assert (row["disturbed"], row["time"]["step_ms_p50"]) == (None, 9.0)
    assert [(one["disturbed"], one["step_ms_p50"]) for one in row["reruns"]] == [("noise", 5.0)]
    kept = json.loads((tmp_path / "disturbed-1.json").read_text())
    assert (kept["disturbed"], kept["time"]["step_ms_p50"]) == ("noise", 5.0)
    assert [line["loss/train"] for line in history(tmp_path)] == [9.0]
    assert json.loads((tmp_path / "disturbed-1.jsonl").read_text())["loss/train"] == 5.0


def test_it_is_measured_again_twice_at_most_and_the_last_one_counts(tmp_path: Path) -> None:
    """However fast those before were: the best of three would be another figure."""
    row, num_left = measured(tmp_path, ("a", 2.0), ("b", 1.0), ("c", 3.0), (None, 4.0))
    assert num_left == 1
    assert (row["disturbed"], row["time"]["step_ms_p50"], row["throughput"]["samples_per_s"]) == ("c", 3.0, 1e3 / 3)
    assert [one["step_ms_p50"] for one in row["reruns"]] == [2.0, 1.0]
    assert all((tmp_path / f"disturbed-{number}.json").exists() for number in (1, 2))


@pytest.mark.parametrize(("reruns", "mode"), [(0, "measure"), (1, "train")])
def test_who_wants_none_gets_none(tmp_path: Path, reruns: int, mode: str) -> None:
    """Marked all the same. Training is not begun again for a figure."""
    row, num_left = measured(tmp_path, ("noise", 5.0), (None, 9.0), reruns=reruns, mode=mode)
    assert (num_left, row["disturbed"], row["reruns"]) == (1, "noise", None)


@pytest.mark.parametrize("status", ["killed", "oom", "interrupted"])
def test_one_that_fails_takes_nothing_away(tmp_path: Path, status: str) -> None:
    row, _ = measured(tmp_path, ("noise", 5.0), status)
    assert (row["status"], row["disturbed"], row["time"]["step_ms_p50"]) == ("ok", "noise", 5.0)
    assert [one["status"] for one in row["reruns"]] == [status]
    assert [line["loss/train"] for line in history(tmp_path)] == [5.0]
    assert not list(tmp_path.glob("disturbed-*"))


def test_tables_reports_and_summaries_show_it(tmp_path: Path) -> None:
    measured(tmp_path / "a", ("noise", 5.0), ("<b>loud</b>", 6.0), ("noise", 7.0))
    rows = collect(tmp_path)
    table = build(rows)
    assert [column.texts for column in table.columns if column.title == "disturbed"] == [("yes",)]
    again = "measured 3 times; the others: 5 ms a step (noise), 6 ms a step (<b>loud</b>)"
    assert f"name: {again}" in table.notes
    assert f"disturbed: noise, {again}" in summary(rows[0])
    save(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "measured 3 times" in page
    assert "<b>loud" not in page


def test_it_is_a_fresh_process_each_time(call: Callable[..., Outcome]) -> None:
    """For real: a step that stalls in each of them."""
    words = ("mode=measure", "measure.steps=4", "measure.reruns=1", "name=stall@5")
    outcome = call(*TINY, *words)
    assert outcome.code == 0, outcome.said()
    assert outcome.out.count("started") == 2
    assert "disturbed, so measured again: " in outcome.out
    row = outcome.row
    assert "more or less than their median" in row["disturbed"]
    assert len(row["reruns"]) == 1
    assert history(outcome.folder)[-1]["step"] == 7
