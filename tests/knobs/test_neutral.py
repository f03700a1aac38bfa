"""The baseline: neutral options act on nothing."""

from __future__ import annotations

import pytest

from lowvram.core.knob import Exactness
from lowvram.core.rig import assemble
from tests.laboratory import CPU, KNOBS, NEUTRAL, PROBLEMS

NECESSARY = {"optimizer", "stepping"}  # without one nothing trains


@pytest.mark.parametrize("group", sorted(NEUTRAL.keys() - NECESSARY))
def test_a_neutral_option_leaves_the_rig_as_it_is(group: str) -> None:
    knob, rig = KNOBS[group, NEUTRAL[group]], assemble(PROBLEMS["resnet"], {}, CPU)
    assert knob.apply(rig) is rig
    assert not knob.needs()
    assert knob.caveat(rig.model) is None


@pytest.mark.parametrize("group", sorted(NEUTRAL))
def test_a_neutral_option_is_exact_saves_nothing_and_breaks_nothing(group: str) -> None:
    knob = KNOBS[group, NEUTRAL[group]]
    assert (knob.exactness, knob.band, knob.saves, knob.breaks()) == (Exactness.EXACT, 0.0, None, frozenset())
