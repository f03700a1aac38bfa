"""Spaces of options, and estimates of combinations."""

from __future__ import annotations

import pytest

from lowvram.config.registry import knob_of, ready_options
from lowvram.core.device import absent_from
from lowvram.search.space import Estimator, Plan, Space, space_of, useless

ABSENT = absent_from(None, 1, "the CPU")
SIZES = {"parameters": 100, "gradients": 100, "optimizer": 200, "activations": 600, "host": 0}


def space(*groups: str, fixed: tuple[str, ...] = ()) -> tuple[Space, dict[tuple[str, str], str]]:
    base = {"ckpt": "none", "precision": "fp32", "stepping": "after_backward", "compile": "none", "accum": "none"}
    knobs = {(group, name): knob_of((group, name)) for group in groups for name in ready_options(group)}
    others = {f"{group}={base[group]}": knob_of((group, base[group])) for group in fixed}
    return space_of({group: base[group] for group in groups}, knobs, others, ABSENT)


def plan(step_ms: float = 10.0, least_bytes: int = 1100, **sizes: int) -> Plan:
    """100 bytes of what is needed are no tensors'."""
    by_kind, tensors = {**SIZES, **sizes}, {"reserved_bytes": least_bytes - 100, "allocated_bytes": least_bytes - 100}
    return {"step_ms": step_ms, "least_vram_bytes": least_bytes, "by_kind_max": by_kind, **tensors}


def test_what_the_device_cannot_do_is_no_part_of_the_space() -> None:
    found, refused = space("precision")
    assert "tf32" not in found.names["precision"]
    assert "it is the CPU here" in refused["precision", "tf32"]
    assert found.names["precision"][0] == "fp32"


def test_what_the_other_knobs_refuse_is_no_part_of_it_either() -> None:
    found, refused = space("ckpt", fixed=("compile",))
    assert "compiler" not in found.names["ckpt"]
    assert refused["ckpt", "compiler"] == "ckpt=compiler needs that the model is compiled, and compile=none ends that"


def test_combinations_are_those_that_can_be_had() -> None:
    """Each is what the facts say of it as a whole."""
    found, _ = space("ckpt", "compile", "stepping")
    combinations = list(found.combinations())
    assert {"ckpt": "compiler", "compile": "none", "stepping": "after_backward"} not in combinations
    assert {"ckpt": "compiler", "compile": "blocks", "stepping": "after_backward"} in combinations
    assert 0 < len(combinations) < found.size
    assert combinations[0] == found.base
    assert len({tuple(one.values()) for one in combinations}) == len(combinations)


def test_singles_stand_beside_the_base() -> None:
    found, _ = space("ckpt", "accum")
    singles = dict(found.singles())
    assert singles["ckpt", "every1"] == {"ckpt": "every1", "accum": "none"}
    assert ("ckpt", "none") not in singles
    assert set(found.without({("ckpt", "every1"): "useless"}).names["ckpt"]) == set(found.names["ckpt"]) - {"every1"}


def test_an_estimate_takes_factors_of_what_there_is() -> None:
    half, small = plan(8.0, 800, activations=300), plan(15.0, 620, activations=120)
    singles = {("precision", "bf16"): half, ("ckpt", "every1"): small}
    alone = Estimator(plan(), singles).estimate({"precision": "bf16", "ckpt": "none"})
    assert alone.step_ms == 8.0
    assert alone.least_bytes == pytest.approx(100 + 700)
    both = Estimator(plan(), singles).estimate({"precision": "bf16", "ckpt": "every1"})
    assert both.num_changes == 2
    assert both.step_ms == pytest.approx(12.0)
    assert both.least_bytes == pytest.approx(100 + 400 + 60)


def test_the_host_s_memory_is_none_of_a_card() -> None:
    away = plan(12.0, 500, activations=10, host=600)
    options, option = {"offload": "activations"}, ("offload", "activations")
    assert Estimator(plan(), {option: away}).estimate(options).least_bytes < 600
    on_cpu, away_on_cpu = {**plan(), "reserved_bytes": None}, {**away, "reserved_bytes": None}
    assert Estimator(on_cpu, {option: away_on_cpu}).estimate(options).least_bytes > 1000


def test_only_what_saves_or_is_faster_is_of_use() -> None:
    assert useless(plan(), plan()) == "no kind of memory gets smaller, and no step faster"
    assert useless(plan(), plan(step_ms=12.0, activations=700)) is not None
    assert useless(plan(), plan(step_ms=9.0, least_bytes=2000)) is None
    assert useless(plan(), plan(step_ms=12.0, gradients=10)) is None
    assert useless(plan(), plan(least_bytes=1000)) is None
