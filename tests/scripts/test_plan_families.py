"""The points of scripts/benchmarks/plan_families.py."""

from __future__ import annotations

from scripts.benchmarks.plan_families_points import HELD_OUT, HELD_OUT_KINDS, KINDS, family_points


def test_a_third_of_the_families_is_held_out() -> None:
    assert set(HELD_OUT_KINDS) <= KINDS.keys()
    assert 3 * len(set(HELD_OUT_KINDS)) == len(KINDS)
    held_out = {spec.name.split()[0] for spec in family_points() if spec.family == HELD_OUT}
    assert held_out == set(HELD_OUT_KINDS)


def test_every_point_has_a_name_of_its_own_and_only_longer_ones_change_the_model() -> None:
    specs = family_points()
    assert len({spec.name for spec in specs}) == len({tuple(spec.words) for spec in specs}) == len(specs)
    changed = [spec.name for spec in specs if any(word.startswith("model.args") for word in spec.words)]
    assert changed == ["gpt2 2048", "gpt2 4096", "llama 2048", "llama 4096"]
