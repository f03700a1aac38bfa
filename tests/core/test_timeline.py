"""The memory over a step: few moments, the peak among them, each in its phase."""

from __future__ import annotations

import pytest
import torch

from lowvram.core.assemble import assemble
from lowvram.core.kind import Kind
from lowvram.core.ledger import ledger
from lowvram.core.phases import BETWEEN, with_phases
from lowvram.core.step import step
from lowvram.core.timeline import Moment, Timeline
from tests.laboratory import CPU, PROBLEMS, knobs_of, make_batch

KIB = 1024


def total(moment: Moment) -> int:
    return sum(num_bytes for kind, num_bytes in moment.by_kind.items() if kind is not Kind.HOST)


def test_a_moment_is_what_is_alive_after_an_event() -> None:
    before = torch.empty(KIB, dtype=torch.uint8)
    with ledger(inputs=before) as peak:
        timeline = Timeline(peak)
        kept = torch.empty(2 * KIB, dtype=torch.uint8)
        timeline.mark("backward")
        temporary = torch.empty(4 * KIB, dtype=torch.uint8)
        del temporary
    moments = timeline.moments()
    assert [(moment.event, moment.phase) for moment in moments] == [(0, BETWEEN), (1, "backward"), (2, "backward")]
    assert [moment.by_kind[Kind.ACTIVATIONS] for moment in moments] == [2 * KIB, 6 * KIB, 2 * KIB]
    assert [moment.by_kind[Kind.INPUTS] for moment in moments] == [KIB] * 3
    del kept


@pytest.mark.parametrize("choices", [{}, {"accum": "x4"}, {"ckpt": "every1", "stepping": "in_backward"}], ids=str)
def test_a_step_is_told_in_few_moments_with_its_peak(choices: dict[str, str]) -> None:
    problem = PROBLEMS["transformer"]
    rig, batch = assemble(problem, knobs_of(**choices), CPU), make_batch(problem.spec, 8)
    step(rig, batch)
    with ledger(rig.model, rig.stepper, batch.tensors(), CPU) as plain:
        step(rig, batch)
    with ledger(rig.model, rig.stepper, batch.tensors(), CPU) as peak:
        timeline = Timeline(peak)
        step(with_phases(rig, timeline), batch)
    assert (peak.peak_bytes, peak.by_kind, peak.by_kind_max) == (plain.peak_bytes, plain.by_kind, plain.by_kind_max)
    for most in (20, 200):
        moments = timeline.moments(most)
        assert len(moments) <= most + 1
        assert max(map(total, moments)) == peak.peak_bytes
        assert [moment.event for moment in moments] == sorted({moment.event for moment in moments})
    assert {"forward", "backward", "update"} <= {moment.phase for moment in moments}
    parameters = sum(4 * parameter.numel() for parameter in rig.model.parameters())
    assert all(moment.by_kind[Kind.PARAMETERS] >= parameters for moment in moments)
    assert total(moments[-1]) < peak.peak_bytes


def test_a_step_without_an_event_has_no_moment() -> None:
    with ledger() as peak:
        timeline = Timeline(peak)
    assert timeline.moments() == []
