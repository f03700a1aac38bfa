"""Which points a chart over the size of the batch joins."""

from __future__ import annotations

from typing import Any

from lowvram.results.ablation import ablations
from lowvram.results.report.batch_size import batch_sizes
from lowvram.results.row import Row
from tests.synthetic import failed, point


def sized(index: int, size: int, parts: int | None = None, **more: Any) -> Row:
    accum = {"accum": f"x{parts}"} if parts else {}
    config = {"train": {"batch_size": size}, "accum": {"parts": parts}, "ckpt": {}}
    return point(index, {**accum, **more}, config=config)


def test_over_the_batch_a_line_for_each_of_the_other_choices() -> None:
    rows = [sized(0, 8), sized(1, 16), sized(2, 8, 2), sized(3, 16, 2, ckpt="every1")]
    assert batch_sizes(rows, ablations(rows)) == {
        "title": "samples of a batch",
        "sizes": [8, 16, 8, 16],
        "lines": ["none, none", "none, none", "none, x2", "every1, x2"],
        "noise_scale": None,
    }


def test_over_the_parts_where_only_they_were_swept() -> None:
    rows = [sized(0, 8), sized(1, 8, 2), sized(2, 8, 4)]
    told = batch_sizes(rows, ablations(rows))
    assert told == {"title": "samples at a time", "sizes": [8, 4, 2], "lines": ["", "", ""], "noise_scale": None}


def trained(index: int, size: int, steps: int, noise_scale: float | None = None, **more: Any) -> Row:
    train = {"batch_size": size, "steps": steps, "eval_every": steps // 2}
    return point(index, more, config={"train": train}, gradient={"noise_scale": noise_scale})


def test_points_that_have_seen_equally_much_are_joined() -> None:
    rows = [trained(0, 8, 40), trained(1, 32, 10), trained(2, 48, 6), trained(3, 8, 40, optimizer="sgd")]
    told = batch_sizes(rows, ablations(rows))
    assert told is not None
    assert told["lines"] == ["adamw", "adamw", "adamw", "sgd"]
    rows = [trained(0, 8, 40), trained(1, 32, 10), trained(2, 8, 80)]
    told = batch_sizes(rows, ablations(rows))
    assert told is not None
    assert len(set(told["lines"])) == 3


def test_the_noise_scale_is_the_median_of_what_was_measured() -> None:
    rows = [trained(0, 8, 40, 5.0), trained(1, 16, 20, 7.0), trained(2, 32, 10, 30.0), trained(3, 64, 5)]
    told = batch_sizes(rows, ablations(rows))
    assert told is not None
    assert told["noise_scale"] == 7.0


def test_nothing_where_it_was_not_swept_or_did_not_run() -> None:
    rows = [sized(0, 8), sized(1, 8, ckpt="every1")]
    assert batch_sizes(rows, ablations(rows)) is None
    rows = [sized(0, 8), failed(1, "oom", "why", config={"train": {"batch_size": 16}})]
    assert batch_sizes(rows, ablations(rows)) is None
