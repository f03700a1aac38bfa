"""The baseline: neutral options act on nothing."""

from __future__ import annotations

import pytest

from lowvram.core.assemble import assemble
from lowvram.core.fact import Fact
from lowvram.core.knob import Exactness
from tests.laboratory import CPU, KNOBS, NEUTRAL, PROBLEMS

NECESSARY = {"optimizer", "stepping"}  # without one nothing trains
TRUE_OF_ONE_PROCESS = {Fact.ONE_RANK}  # what a baseline may rely on
GIVEN_BY_A_KNOB = {Fact.COMPILED}  # what is only true once an option has made it so


@pytest.mark.parametrize("group", sorted(NEUTRAL.keys() - NECESSARY))
def test_a_neutral_option_leaves_the_rig_as_it_is(group: str) -> None:
    knob, rig = KNOBS[group, NEUTRAL[group]], assemble(PROBLEMS["resnet"], {}, CPU)
    assert knob.apply(rig) is rig
    assert knob.needs() <= TRUE_OF_ONE_PROCESS
    assert knob.caveat(rig.model) is None


@pytest.mark.parametrize("group", sorted(NEUTRAL))
def test_a_neutral_option_is_exact_saves_nothing_and_breaks_nothing(group: str) -> None:
    knob = KNOBS[group, NEUTRAL[group]]
    assert (knob.exactness, knob.band, knob.saves) == (Exactness.EXACT, 0.0, None)
    assert knob.breaks() <= GIVEN_BY_A_KNOB
