"""optimizer=apollo and apollo_mini: the update against one written out, the limit of its growth, and exact states."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import lowvram
from lowvram.core.assemble import assemble
from lowvram.core.step import step
from lowvram.knobs.optimizer import Apollo, ApolloMini, apollo
from lowvram.knobs.optimizer.apollo import along, limit, ratio
from lowvram.knobs.optimizer.low_rank import lying, random_projection
from lowvram.knobs.optimizer.matrices import MatrixKnob, roles_of
from tests.laboratory import CPU, PROBLEMS, batches, knobs_of

WITHOUT_LIMIT = 1e30
SHAPES = [(4, 6), (6, 4), (4, 2, 3, 3), (24, 2, 3, 3)]


def trained(knob: MatrixKnob, weight: nn.Parameter, gradients: list[Tensor]) -> Tensor:
    """A copy of the weight after an update with each gradient."""
    module = nn.Linear(1, 1, bias=False) if weight.ndim == 2 else nn.Conv2d(1, 1, 1, bias=False)
    module.weight = nn.Parameter(weight.detach().clone(memory_format=torch.preserve_format))
    optimizer = knob.make([module.weight], roles_of(module, (), knob.layers))
    for gradient in gradients:
        module.weight.grad = gradient.clone()
        optimizer.step()
        assert torch.equal(module.weight.grad, gradient)
    return module.weight.detach()


def drawn(shape: tuple[int, ...]) -> tuple[nn.Parameter, list[Tensor]]:
    draw = torch.Generator().manual_seed(0)
    weight, *gradients = (torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(5))
    return nn.Parameter(weight), gradients


@pytest.mark.parametrize("option", ["apollo", "galore", "sinkgd", "muon"])
def test_weights_that_are_computed_are_not_asked_for(option: str) -> None:
    """Asking for the weight of a layer with spectral norm changes the norm's buffers."""
    norm, x = nn.utils.parametrizations.spectral_norm, torch.randn(3, 4)
    model = nn.Sequential(norm(nn.Linear(4, 4)), nn.Tanh(), norm(nn.Linear(4, 2)))
    before = [buffer.clone() for buffer in model.buffers()]
    lowvram.assemble(lowvram.task(model, x), f"optimizer={option}", "cpu")
    assert all(map(torch.equal, before, model.buffers()))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_of_full_rank_and_orthonormal_it_is_adamw_scaled_by_channels(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adam's update of each channel along the channel's gradient: the law that the method approximates."""
    monkeypatch.setattr(apollo, "random_projection", lambda rank, rows, seed, like: torch.eye(rows).to(like))
    weight, gradients = drawn(shape)
    found = trained(Apollo(0.01, 0.8, 0.9, 1e-6, 0.2, max_growth=WITHOUT_LIMIT, rank_share=1.0), weight, gradients)
    plain = nn.Parameter(torch.zeros_like(weight))
    adam = torch.optim.Adam([plain], 1.0, (0.8, 0.9), 1e-6)
    wanted = weight.detach().clone()
    for gradient in gradients:
        plain.grad, before = gradient, plain.detach().clone()
        adam.step()
        update = lying(before - plain.detach())
        scales = update.norm(dim=0) / lying(gradient).norm(dim=0)
        wanted.mul_(1 - 0.01 * 0.2).sub_(along(scales, gradient) * gradient, alpha=0.01)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_memory_formats_of_convolutions_train_alike(memory_format: torch.memory_format) -> None:
    weight, gradients = drawn((8, 4, 3, 3))
    other = nn.Parameter(weight.detach().to(memory_format=memory_format))
    found = trained(Apollo(), other, [gradient.to(memory_format=memory_format) for gradient in gradients])
    torch.testing.assert_close(found, trained(Apollo(), weight, gradients), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "knob", [Apollo(max_growth=WITHOUT_LIMIT), ApolloMini(max_growth=WITHOUT_LIMIT)], ids=["", "mini"]
)
def test_steps_are_as_large_as_adamws(knob: MatrixKnob) -> None:
    """So that they share a learning rate: the root mean square of the first AdamW step is `lr`."""
    weight, gradients = drawn((256, 512))
    step = (trained(replace(knob, weight_decay=0.0), weight, gradients[:1]) - weight).square().mean().sqrt()
    assert 0.9 < step / knob.lr < 1.1


def test_an_update_grows_by_at_most_its_limit() -> None:
    state: dict[str, Tensor] = {}
    norms = [1.0, 5.0, 0.0, 5.0, 0.5]
    found = [float(norm * limit(torch.tensor(norm), state, 1.1)) for norm in norms]
    assert found == pytest.approx([1.0, 1.1, 0.0, 1.1 * 1.1, 0.5])


def test_a_channel_without_gradient_stands_still() -> None:
    """Although its moments aren't zero."""
    weight, gradients = drawn((4, 6))
    gradients[-1][:, 2] = 0
    before, after = (trained(Apollo(weight_decay=0.0), weight, gradients[:end]) for end in (-1, None))
    assert torch.equal(after[:, 2], before[:, 2])
    assert not torch.equal(after[:, 1], before[:, 1])
    assert ratio(torch.ones(2), torch.tensor([0.0, 2.0])).tolist() == [0.0, 0.5]


def test_projections_have_their_moments_and_depend_on_the_seed_alone() -> None:
    like = torch.empty(0)
    found = random_projection(64, 512, "a", like)
    assert torch.equal(found, random_projection(64, 512, "a", like))
    assert not torch.equal(found, random_projection(64, 512, "b", like))
    assert found.isfinite().all()
    assert abs(float(found.mean())) < 4 / math.sqrt(64 * 64 * 512)
    assert float(found.square().mean()) * 64 == pytest.approx(1, abs=0.05)
    assert float(found.square().square().mean()) * 64**2 == pytest.approx(3, abs=0.3)


def bytes_of_states(option: str, model: str) -> list[tuple[int, int, int]]:
    """Of each matrix of a model, after a step: the bytes of its state, and its smaller and its larger side. All other
    parameters have AdamW's states."""
    rig = assemble(PROBLEMS[model], knobs_of(optimizer=option), CPU)
    step(rig, next(batches(PROBLEMS[model].spec, [4])))
    states = rig.stepper.optimizer.state  # pyright: ignore[reportAttributeAccessIssue]
    roles, found = roles_of(rig.model, rig.structure.last_weights, Apollo.layers), []
    for parameter in rig.trainable:
        num_bytes = sum(value.nbytes for value in states[parameter].values() if isinstance(value, Tensor))
        if roles[parameter].is_matrix:
            rows, columns = sorted((len(parameter), parameter[0].numel()))
            found.append((num_bytes, rows, columns))
        else:
            assert num_bytes == 8 * parameter.numel() + 4
    assert found
    return found


@pytest.mark.parametrize("model", ["transformer", "resnet"])
def test_bytes_of_states_are_exact(model: str) -> None:
    """Two moments of the projection, which itself is kept nowhere, and the norm of the last update."""
    for num_bytes, rows, columns in bytes_of_states("apollo", model):
        assert num_bytes == 8 * max(1, round(rows / 4)) * columns + 4
    for num_bytes, _, columns in bytes_of_states("apollo_mini", model):
        assert num_bytes == 8 * columns + 4
