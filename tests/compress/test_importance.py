"""Scores of units, against their definitions computed in another way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lowvram.compress.importance import Magnitude, Taylor, Wanda
from lowvram.core.assemble import assemble
from lowvram.core.rig import Part, Rig
from lowvram.data.spec import DataSpec, Modality
from lowvram.knobs.accum import Parts
from lowvram.models.hf import HfConfig
from lowvram.models.remade import Remade, Trained
from lowvram.models.widths import InnerWidth
from lowvram.tasks import Auto
from tests.hugging import with_weights
from tests.laboratory import CPU, IMAGES, RESNET, TOKENS, TRANSFORMER, knobs_of, make_batch

PRUNABLE = {
    "transformer": Auto().pose(replace(TRANSFORMER, num_heads=4, num_kv_heads=2), TOKENS),
    "resnet": Auto().pose(RESNET, IMAGES),
    "gpt2": Auto().pose(HfConfig(with_weights("gpt2")), DataSpec(Modality.TOKENS, 256, (8,))),  # inputs before outputs
}
model_of = pytest.mark.parametrize("name", PRUNABLE)


def prepared(name: str, parts: int = 1) -> tuple[Rig, list[InnerWidth], list[Part]]:
    """A rig in evaluation mode whose weights all count, the widths of its model, and batches."""
    problem, draw = PRUNABLE[name], torch.Generator().manual_seed(0)
    rig = assemble(problem, knobs_of(accum=Parts(parts)), CPU)
    with torch.no_grad():
        for parameter in rig.model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=draw))
    rig.model.double().eval()
    dtype = torch.float64 if name == "resnet" else torch.float32  # tokens are integers
    batches = [make_batch(problem.spec, 4, seed, dtype) for seed in range(2)]
    assert isinstance(problem.model, Remade)
    trained = Trained(rig.model, problem.spec, lambda: batches[0].inputs)
    return rig, problem.model.smaller(trained, 0.5, 4).widths, batches


def reader_of(rig: Rig, width: InnerWidth) -> nn.Module:
    return rig.model.get_submodule(width.layer)


def with_gate(rig: Rig, width: InnerWidth, unit: int, gate: float, measure: Callable[[], Tensor]) -> Tensor:
    """What `measure` returns if what one unit passes on is multiplied by `gate`."""
    weight = reader_of(rig, width).weight
    assert isinstance(weight, Tensor)
    before, (_, dim, places) = weight.detach().clone(), width.reader
    with torch.no_grad():
        weight.index_copy_(dim, places[unit], before.index_select(dim, places[unit]) * gate)
        try:
            return measure()
        finally:
            weight.copy_(before)


def mean_loss(rig: Rig, batch: Part) -> Tensor:
    return rig.criterion(rig.forward(batch), batch) / rig.total([batch])


@pytest.mark.sampled(2)
@model_of
@pytest.mark.parametrize("parts", [1, 2])
def test_taylor_is_the_slope_of_the_loss_as_the_unit_fades(name: str, parts: int) -> None:
    rig, widths, batches = prepared(name, parts)
    scores = Taylor().scores(rig, widths, batches)
    for index in (0, len(widths) - 1):
        width, unit, step = widths[index], 1, 1e-5
        slopes = []
        for batch in batches:
            more, less = (
                with_gate(rig, width, unit, gate, lambda batch=batch: mean_loss(rig, batch))
                for gate in (1 + step, 1 - step)
            )
            slopes.append(float(more - less) / (2 * step))
        expected = sum(map(abs, slopes)) / len(slopes)
        assert float(scores[index][unit]) == pytest.approx(expected, rel=1e-5, abs=1e-9)


@model_of
def test_wanda_is_the_norm_of_the_inputs_times_the_weights(name: str) -> None:
    rig, widths, batches = prepared(name)
    scores = Wanda().scores(rig, widths, batches)
    width, seen = widths[0], list[Tensor]()
    hook = reader_of(rig, width).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    for batch in batches:
        rig.forward(batch)
    hook.remove()
    channels = torch.cat([x.movedim(1 if name == "resnet" else -1, 0).flatten(1) for x in seen], 1)
    weight = reader_of(rig, width).weight
    assert isinstance(weight, Tensor)
    _, dim, places = width.reader
    by_hand = [
        sum(channels[at].norm() * weight.select(dim, at).abs().sum() for at in places[unit].tolist())
        for unit in range(width.num_units)
    ]
    assert torch.allclose(scores[0], torch.stack([torch.as_tensor(each) for each in by_hand]).double(), rtol=1e-5)
    assert not any(reader_of(rig, width)._forward_pre_hooks for width in widths)


@model_of
def test_magnitude_is_the_norm_of_what_writes_and_reads_the_unit(name: str) -> None:
    rig, widths, _ = prepared(name)
    scores, width = Magnitude().scores(rig, widths, []), widths[-1]
    state, unit = rig.model.state_dict(), 2
    weights = [each for each in [*width.writers, width.reader] if each.name.endswith("weight")]
    squares = [state[name].index_select(dim, places[unit]).square().sum() for name, dim, places in weights]
    assert float(scores[-1][unit]) == pytest.approx(float(torch.stack(squares).sum().sqrt()), rel=1e-9)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("importance", [Magnitude(), Wanda(), Taylor()])
@model_of
def test_a_unit_that_does_nothing_is_the_least_important(importance: Magnitude | Wanda | Taylor, name: str) -> None:
    rig, widths, batches = prepared(name)
    state = rig.model.state_dict()
    for width in widths:
        for tensor, dim, places in width.slices():
            state[tensor].index_fill_(dim, places[1], 0.0)
    scores: Sequence[Tensor] = importance.scores(rig, widths, batches)
    assert all(int(score.argmin()) == 1 and score.min() == 0 for score in scores)
