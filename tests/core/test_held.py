"""What is held between steps, counted without a ledger: the ledger's bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowvram.core.assemble import assemble
from lowvram.core.held import held_bytes
from lowvram.core.kind import Kind
from lowvram.core.ledger import ledger
from lowvram.core.step import step
from lowvram.core.timeline import Timeline
from tests.laboratory import CPU, PROBLEMS, knobs_of, make_batch

CHOICES: list[dict[str, Any]] = [
    {},
    {"precision": "bf16_pure"},
    {"stepping": "in_backward"},
    {"stepping": "cpu_offload"},
]


@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_it_is_what_a_ledger_finds_at_the_end_of_a_step(choices: dict[str, Any]) -> None:
    problem = PROBLEMS["transformer"]
    rig = assemble(problem, knobs_of(**choices), CPU)
    before = held_bytes(rig.model, rig.stepper)
    batch = make_batch(problem.spec, 4)
    step(rig, batch)
    with ledger(rig.model, rig.stepper, batch.tensors(), CPU) as peak:
        timeline = Timeline(peak)
        step(rig, batch)
    last = timeline.moments()[-1].by_kind
    held = held_bytes(rig.model, rig.stepper)
    on_host = held.pop(Kind.HOST)
    assert {kind: last[kind] for kind in held} == held
    assert (on_host > 0) == (last[Kind.HOST] > 0)
    assert on_host <= last[Kind.HOST]  # which has the buffers for copies as well
    held[Kind.HOST] = on_host
    assert held[Kind.OPTIMIZER] + held[Kind.HOST] > before[Kind.OPTIMIZER] + before[Kind.HOST]  # made by the first step


def test_gradients_that_stay_are_counted_and_what_is_shared_counts_once() -> None:
    model = torch.nn.Linear(256, 256, bias=False)
    tied = torch.nn.ModuleList([model, torch.nn.Linear(256, 256, bias=False)])
    tied[1].weight = model.weight
    optimizer = torch.optim.SGD(tied.parameters(), lr=0.1)
    assert held_bytes(tied, optimizer)[Kind.PARAMETERS] == 4 * 256 * 256
    model(torch.ones(1, 256)).sum().backward()
    assert held_bytes(tied, optimizer)[Kind.GRADIENTS] == 4 * 256 * 256
