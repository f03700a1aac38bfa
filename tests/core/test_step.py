"""The one training step: what it asks of the rig, in which order."""

from __future__ import annotations

import inspect
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lowvram.core.assemble import assemble
from lowvram.core.rig import IGNORE, Part, one_after_another
from lowvram.core.step import step
from tests.laboratory import CPU, PROBLEMS, InDouble, knobs_of, make_batch, relative_error


def test_the_step_is_short() -> None:
    assert len(inspect.getsource(step).splitlines()) <= 15


def test_a_step_is_a_hand_written_loop() -> None:
    """Loss and parameters after three steps of AdamW, in fp64."""
    problem = InDouble(PROBLEMS["transformer"])
    ours, model = assemble(problem, knobs_of(), CPU), assemble(problem, knobs_of(), CPU).model
    decay = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    keep = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": keep, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for seed in range(3):
        batch = make_batch(problem.spec, 4, seed)
        loss = torch.nn.functional.cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found, update = step(ours, batch)
        assert update.applied
        torch.testing.assert_close(found, loss.detach(), rtol=1e-12, atol=0)
    assert relative_error(dict(ours.model.named_parameters()), dict(model.named_parameters())) < 1e-12


def test_a_part_weighs_as_many_targets_as_it_has() -> None:
    """Each part is divided by the targets of all of them, whatever the number of its own; one may have none."""
    problem = PROBLEMS["transformer"]
    batch = make_batch(problem.spec, 4)
    batch.targets[2:] = IGNORE
    rig = assemble(problem, knobs_of(accum="x2"), CPU)
    whole, _ = step(assemble(problem, knobs_of(), CPU), Part(batch.inputs[:2], batch.targets[:2]))
    parts, update = step(rig, batch)
    torch.testing.assert_close(parts, whole)
    assert update.applied
    assert rig.run is one_after_another


def test_each_part_is_moved_when_it_is_computed() -> None:
    """One after the other, and nobody holds a part that autograd doesn't need any more."""
    problem = PROBLEMS["transformer"]
    rig, moved, alive = assemble(problem, knobs_of(accum="x4"), CPU), list[weakref.ref[Tensor]](), list[int]()

    def move(part: Part) -> Part:
        alive.append(sum(reference() is not None for reference in moved))
        copy = part.map(Tensor.clone)
        moved.extend(weakref.ref(tensor) for tensor in copy.tensors())
        return copy

    batch = make_batch(problem.spec, 8)
    found, _ = step(replace(rig, move=move), batch)
    assert alive == [0, 0, 0, 0]
    assert torch.equal(found, step(assemble(problem, knobs_of(accum="x4"), CPU), batch)[0])


@pytest.mark.parametrize("logits", ["full", "chunked", "tiled"])
def test_a_batch_in_which_no_target_counts_has_no_mean_and_no_gradients(logits: str) -> None:
    task = PROBLEMS["transformer"]
    batch = make_batch(task.spec, 4)
    rig = assemble(task, knobs_of(logits=logits, accum="x2"), CPU)
    loss, update = step(rig, Part(batch.inputs, torch.full_like(batch.targets, IGNORE)))
    assert loss.isnan()
    assert update.applied
    assert update.grad_norm == 0
