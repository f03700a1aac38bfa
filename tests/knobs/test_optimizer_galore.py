"""optimizer=galore: the update against one written out, the directions that it keeps, and exact states."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lowvram.knobs.optimizer import GaLore
from lowvram.knobs.optimizer.galore import BASIS, GaLoreOptimizer, largest_directions
from lowvram.knobs.optimizer.low_rank import lying
from tests.knobs.test_optimizer_apollo import SHAPES, bytes_of_states, drawn, trained
from tests.laboratory import CPU


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_adamw_in_the_first_gradients_largest_directions(shape: tuple[int, ...]) -> None:
    """Those of a singular value decomposition, whose signs don't matter."""
    weight, gradients = drawn(shape)
    wanted = lying(weight.detach()).clone()
    rank = len(wanted) // 2
    basis = torch.linalg.svd(lying(gradients[0])).U[:, :rank]
    first, second = torch.zeros(2, rank, wanted.shape[1], dtype=torch.float64)
    for step, gradient in enumerate(gradients, 1):
        projected = basis.T @ lying(gradient)
        first = 0.8 * first + 0.2 * projected
        second = 0.9 * second + 0.1 * projected**2
        update = basis @ (first / (1 - 0.8**step) / ((second / (1 - 0.9**step)).sqrt() + 1e-6))
        wanted = wanted * (1 - 0.01 * 0.2) - 0.01 * 2 * math.sqrt(len(wanted) / rank) * update
    knob = GaLore(0.01, 0.8, 0.9, 1e-6, 0.2, scale=2.0, rank_share=0.5)
    torch.testing.assert_close(lying(trained(knob, weight, gradients)), wanted, rtol=1e-10, atol=1e-10)


def test_directions_are_found_anew() -> None:
    weight, gradients = drawn((6, 9))
    optimizer = GaLore(refresh_every=2, rank_share=0.5).of_matrices({weight: 0})
    assert isinstance(optimizer, GaLoreOptimizer)
    for number, gradient in enumerate(gradients):
        weight.grad = gradient
        optimizer.step()
        basis = optimizer.state[weight][BASIS]
        torch.testing.assert_close(projector(basis), projector(largest_directions(gradients[number // 2 * 2], 3)))


def projector(basis: Tensor) -> Tensor:
    return basis @ basis.T


def test_a_gradient_that_is_not_finite_raises_no_error() -> None:
    """The stepper notices it, and ends the run with a sentence of its own."""
    for number in (math.nan, math.inf):
        basis = largest_directions(torch.full((3, 4), number, device=CPU), 2)
        torch.testing.assert_close(basis.T @ basis, torch.eye(2))


@pytest.mark.parametrize("model", ["transformer", "resnet"])
def test_bytes_of_states_are_exact(model: str) -> None:
    """Two moments, and the directions."""
    for num_bytes, rows, columns in bytes_of_states("galore", model):
        rank = max(1, round(rows / 4))
        assert num_bytes == 4 * rank * (2 * columns + rows)
