"""Names of classes that earlier versions wrote are still read."""

from __future__ import annotations

import pytest
from omegaconf import DictConfig, OmegaConf

from lowvram.config.identity import counts, first_name, identity_of
from lowvram.config.not_identity import NEUTRAL_OF_LATER_GROUPS
from lowvram.config.registry import neutral_options, node_of, options_of
from lowvram.config.schema import MOVED, build, present_name
from lowvram.loops.snapshot import differences

GROUPS = ("qat", "sparsity", "mode", "task")  # that have had options elsewhere
OLD = {
    "lowvram.knobs.qat.Int8": "qat=int8",
    "lowvram.knobs.sparsity.NoSparsity": "sparsity=none",
    "lowvram.loops.prune.Prune": "mode=prune",
    "lowvram.loops.grow.Grow": "mode=grow",
    "lowvram.loops.distillation.teach.Teach": "mode=teach",
}


@pytest.mark.parametrize("target", OLD)
def test_a_class_is_found_by_the_name_that_it_had(target: str) -> None:
    group, _, option = OLD[target].partition("=")
    node = node_of(group, option)
    assert node._target_ == present_name(target) != target
    assert build(DictConfig({**node, "_target_": target}), group) == build(node, group)
    assert first_name(node._target_) == target


def test_names_that_have_not_moved_stay() -> None:
    for name in ("lowvram.knobs.ckpt.RecomputeEvery", "lowvram.knobs.qat_too.Int8", "lowvram.loops.train.Train", ""):
        assert present_name(name) == first_name(name) == name


def test_every_move_is_one_of_an_option() -> None:
    targets = [str(node_of(group, option).get("_target_")) for group in GROUPS for option in options_of(group)]
    assert all(any(target.startswith(f"{new}.") for target in targets) for new in MOVED.values())


def test_ids_of_points_and_snapshots_tell_no_difference() -> None:
    node = node_of("sparsity", "none")
    old = OmegaConf.create({"_target_": "lowvram.knobs.sparsity.NoSparsity"})
    assert identity_of("sparsity", node) == identity_of("sparsity", old)
    now, saved = ({"sparsity._target_": each._target_, "seed": 0} for each in (node, old))
    assert differences(now, saved) == []
    assert differences(now, saved | {"seed": 1}) == ["seed=0 (1 in the snapshot)"]


@pytest.mark.parametrize("group", NEUTRAL_OF_LATER_GROUPS)
def test_points_keep_the_ids_that_they_had_before_a_group_came(group: str) -> None:
    neutral = neutral_options()[group]
    assert {option for option in options_of(group) if not counts(group, node_of(group, option))} == {neutral}
