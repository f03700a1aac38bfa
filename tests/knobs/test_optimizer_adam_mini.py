"""optimizer=adam_mini: AdamW with one second moment a row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lowvram.core.assemble import assemble
from lowvram.core.knob import Knob
from lowvram.core.step import step
from lowvram.knobs.optimizer import AdamMini, AdamW
from tests.laboratory import CPU, PROBLEMS, batches, knobs_of, train
from tests.ranks import on_ranks

KNOB = AdamMini(0.01, 0.8, 0.9, 1e-6, 0.2)


def updated(knob: AdamMini | AdamW, weight: Tensor, gradients: list[Tensor]) -> Tensor:
    parameter = nn.Parameter(weight.clone())
    optimizer = knob.make([parameter])
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def drawn(shape: tuple[int, ...]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(4)]


@pytest.mark.parametrize("shape", [(4, 6), (4, 2, 3, 3)], ids=str)
def test_it_is_adamw_with_the_mean_of_squares_of_a_row(shape: tuple[int, ...]) -> None:
    weight, *gradients = drawn(shape)
    wanted, first = weight.clone(), torch.zeros(shape, dtype=torch.float64)
    second = torch.zeros(len(weight), dtype=torch.float64)
    for step_, gradient in enumerate(gradients, 1):
        first = 0.8 * first + 0.2 * gradient
        second = 0.9 * second + 0.1 * gradient.square().flatten(1).mean(1)
        size = (second / (1 - 0.9**step_)).sqrt().view(-1, *[1] * (len(shape) - 1)) + 1e-6
        wanted = wanted * (1 - 0.01 * 0.2) - 0.01 * first / (1 - 0.8**step_) / size
    torch.testing.assert_close(updated(KNOB, weight, gradients), wanted, rtol=1e-10, atol=1e-10)


def test_gpt2s_transposed_weights_are_updated_as_linear_layers_are() -> None:
    """Those of transformers' Conv1D are (in, out)."""
    weight, *gradients = drawn((4, 6))
    rig = assemble(PROBLEMS["transformer"], knobs_of(), CPU)
    rig.model.layer = layer = Conv1D(4, 6).double()  # pyright: ignore[reportAttributeAccessIssue]
    layer.weight.data = weight.t().clone()
    optimizer = KNOB.apply(rig).make_optimizer([layer.weight, layer.bias])
    for gradient in gradients:
        layer.weight.grad = gradient.t().clone()
        optimizer.step()
    torch.testing.assert_close(layer.weight.detach().t(), updated(KNOB, weight, gradients), rtol=1e-10, atol=1e-10)
    assert optimizer.state[layer.weight]["exp_avg_sq"].numel() == 4


@pytest.mark.parametrize("shape", [(5,), ()], ids=str)
def test_biases_and_norms_are_adamws(shape: tuple[int, ...]) -> None:
    weight, *gradients = drawn(shape)
    wanted = updated(AdamW(0.01, 0.8, 0.9, 1e-6, 0.2), weight, gradients)
    torch.testing.assert_close(updated(KNOB, weight, gradients), wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("model", ["transformer", "resnet"])
def test_bytes_of_states_are_exact(model: str) -> None:
    rig = assemble(PROBLEMS[model], knobs_of(optimizer="adam_mini"), CPU)
    step(rig, next(batches(PROBLEMS[model].spec, [4])))
    states = rig.stepper.optimizer.state  # pyright: ignore[reportAttributeAccessIssue]
    for parameter in rig.trainable:
        num_bytes = sum(value.nbytes for value in states[parameter].values() if isinstance(value, Tensor))
        assert num_bytes == 4 * parameter.numel() + 4 * len(parameter)


CHOICES: list[dict[str, str | Knob]] = [{}, {"stepping": "in_backward"}, {"stepping": "cpu_offload", "accum": "x2"}]


def losses_of(choices: list[dict[str, str | Knob]]) -> list[Tensor]:
    task = PROBLEMS["transformer"]
    return [torch.stack(train(task, knobs_of(**each, optimizer="adam_mini"), [32, 32, 27]).losses) for each in choices]


@pytest.mark.slow
def test_shared_weights_train_like_whole_ones() -> None:
    """Ranks share rows, so each has whole ones."""
    (wanted,) = losses_of([{}])
    for ours in on_ranks(losses_of, [{**each, "sharding": "fsdp"} for each in CHOICES]):
        for found in ours:
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=0)
    (alone,) = losses_of([{"offload": "parameters"}])
    assert torch.equal(alone, wanted)
