"""Losses over time and over what was seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lowvram.results.report.curves import MOST_READ, NUM_KEPT, Curve, curve
from tests.synthetic import point

ROW = point(0, {}, time={"step_ms_p50": 100.0})


def log(folder: Path, *lines: dict[str, Any]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_steps_count_what_their_lines_say_else_the_median(tmp_path: Path) -> None:
    losses = [{"step": 2, "loss/train": 5.0}, {"step": 4, "loss/train": 4.0, "time/step_ms": 250.0}]
    log(tmp_path, *losses)
    assert curve(tmp_path, ROW, 128.0, 32) == Curve((5.0, 4.0), (0.2, 0.7), (8192, 16384))


def test_where_batches_grow_the_log_says_how_many_samples_there_were(tmp_path: Path) -> None:
    log(tmp_path, {"step": 2, "loss/train": 5.0, "data/samples": 3}, {"step": 4, "loss/train": 4.0, "data/samples": 11})
    assert curve(tmp_path, ROW, 10.0, 8).seen == (30, 110)


def test_nothing_is_made_up(tmp_path: Path) -> None:
    assert curve(tmp_path, ROW, 1.0, 1) == Curve((), (), ())
    log(tmp_path, {"step": 1, "loss/train": 5.0}, {"step": 1, "loss/eval": 4.0}, {"step": 2, "loss/train": None})
    untimed = point(0, {}, time={"step_ms_p50": None})
    assert curve(tmp_path, untimed, None, 1) == Curve((5.0,), None, None)


def test_what_cannot_be_read_costs_its_line_alone(tmp_path: Path) -> None:
    """And is counted, but for a last line that is half written."""
    log(tmp_path, {"step": 1, "loss/train": 5.0})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "\xff"\n{"step": 3, "loss/train": 4.0}\n{"step": 4, "loss')
    assert curve(tmp_path, ROW, 1.0, 1) == Curve((5.0, 4.0), (0.1, 0.3), (1, 3), num_damaged=1)


def test_a_folder_in_the_place_of_the_log_is_none(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    assert curve(tmp_path, ROW, 1.0, 1) == Curve()


@pytest.mark.parametrize("num_steps", [NUM_KEPT + 1, MOST_READ + 7, 3 * MOST_READ])
def test_long_ones_are_thinned_and_keep_their_end(tmp_path: Path, num_steps: int) -> None:
    log(tmp_path, *({"step": step, "loss/train": step / 1000} for step in range(1, num_steps + 1)))
    found = curve(tmp_path, ROW, 1.0, 1)
    assert found.seen is not None
    assert found.seconds is not None
    assert NUM_KEPT / 2 <= len(found.loss) == len(found.seconds) <= NUM_KEPT
    assert found.seen[-1] == num_steps
    assert found.seconds[-1] == pytest.approx(num_steps / 10)
