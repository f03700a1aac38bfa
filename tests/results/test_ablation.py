"""What differs between points, what each difference did, and which points are the best."""

from __future__ import annotations

import pytest

from lowvram.results.ablation import ablations, baseline, effects, frontier, waterfall
from lowvram.results.row import MIB, Row, merge
from tests import synthetic
from tests.synthetic import failed, point


def names(rows: list[Row]) -> set[str]:
    return {name for each in ablations(rows) for name in each}


def test_settings_are_what_differs() -> None:
    rows = [point(0, {}), point(1, {"ckpt": "every1"})]
    assert ablations(rows) == [{"ckpt": "none"}, {"ckpt": "every1"}]


def test_values_that_come_with_an_option_are_no_settings_of_their_own() -> None:
    rows = [
        point(0, {}, config={"ckpt": {"_target_": "a"}}),
        point(1, {"ckpt": "every1"}, config={"ckpt": {"_target_": "b", "every": 1}}),
    ]
    assert names(rows) == {"ckpt"}
    rows.append(point(2, {"ckpt": "every1"}, config={"ckpt": {"_target_": "b", "every": 3}}))
    assert ablations(rows)[2] == {"ckpt": "every1", "ckpt.every": "3"}


def test_keys_of_no_group_differ_too_but_not_where_results_lie() -> None:
    rows = [
        point(i, {}, config={"train": {"batch_size": size}, "name": str(i), "paths": {"outputs": str(i)}})
        for i, size in enumerate((8, 16))
    ]
    assert ablations(rows) == [{"train.batch_size": "8"}, {"train.batch_size": "16"}]


def test_the_baseline_is_closest_to_the_defaults_and_ran() -> None:
    changed = [point(0, {"precision": "bf16", "ckpt": "every1"}), point(1, {"precision": "bf16"})]
    assert baseline(changed) == 1
    assert baseline([*changed, point(2, {})]) == 2
    assert baseline([*changed, merge(failed(2, "oom", None), {"choices": {"precision": "fp32"}})]) == 1


def test_an_effect_is_the_median_over_pairs_that_differ_in_nothing_else() -> None:
    peaks = {(): 100.0, ("ckpt",): 50.0, ("precision",): 80.0, ("ckpt", "precision"): 20.0}
    options = {"ckpt": "every1", "precision": "bf16"}
    rows = [point(i, {name: options[name] for name in changed}) for i, changed in enumerate(peaks)]
    for row, peak in zip(rows, peaks.values(), strict=True):
        row["memory"]["peak_bytes"] = int(peak * MIB)
    found = {effect.name: effect for effect in effects(rows, ablations(rows), 0)}
    assert found["ckpt"].pairs == ((1, 0), (3, 2))
    assert found["ckpt"].memory_ratio == pytest.approx((0.5 + 0.25) / 2)
    assert found["precision"].memory_ratio == pytest.approx((0.8 + 0.4) / 2)
    assert found["precision"].speed_ratio == pytest.approx(1.4)


def test_points_that_did_not_run_make_no_pair() -> None:
    rows = [point(0, {}), failed(1, "oom", None)]
    assert effects(rows, ablations(rows), 0) == []


def test_losses_after_unequal_steps_are_not_compared() -> None:
    rows = [point(0, {}), point(1, {"ckpt": "every1"})]
    (fair,) = effects(rows, ablations(rows), 0)
    assert fair.loss_ratio == pytest.approx(3.801 / 3.8)
    rows[1]["time"]["steps"] = 3
    (cut,) = effects(rows, ablations(rows), 0)
    assert cut.loss_ratio is None
    assert cut.memory_ratio == fair.memory_ratio


def test_peaks_that_were_measured_in_other_ways_are_not_compared() -> None:
    rows = [point(0, {}), point(1, {"compile": "blocks"}, memory={"source": "process"})]
    assert effects(rows, ablations(rows), 0) == []
    assert frontier(rows) == []


def test_the_frontier_holds_what_no_other_point_beats() -> None:
    rows = [point(i, {}) for i in range(5)]
    for row, (peak, speed) in zip(rows, [(100, 10), (50, 8), (60, 7), (40, 8), (100, 12)], strict=True):
        row["memory"]["peak_bytes"], row["throughput"]["samples_per_s"] = peak * MIB, float(speed)
    assert frontier(rows) == [3, 4]
    rows[4]["status"] = "killed"
    assert frontier(rows) == [3, 0]


def test_a_waterfall_adds_knobs_one_by_one() -> None:
    rows = synthetic.waterfall()
    steps = waterfall(rows, ablations(rows))
    assert steps is not None
    assert [step["added"] for step in steps[:3]] == [[], ["accum=x8"], ["ckpt=every1"]]
    assert [step["is_accumulation"] for step in steps] == [False, True, False, False, False, False]


@pytest.mark.parametrize(
    "rows",
    [
        [point(0, {}), point(1, {"ckpt": "every1"})],  # too few
        [point(0, {}), point(1, {"ckpt": "every1"}), point(2, {"precision": "bf16"})],  # one at a time
        [point(0, {}), point(1, {"ckpt": "every2"}), point(2, {"ckpt": "every1"})],  # exchanged
        [point(0, {}), point(1, {"ckpt": "every1"}), point(2, {"ckpt": "every1", "model": "resnet"})],
    ],
)
def test_other_sweeps_are_none(rows: list[Row]) -> None:
    assert waterfall(rows, ablations(rows)) is None
