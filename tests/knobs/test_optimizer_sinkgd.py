"""optimizer=sinkgd: steps whose rows and columns are equally large, and no state."""

from __future__ import annotations

import pytest
import torch

from lowvram.knobs.optimizer import SinkGD
from lowvram.knobs.optimizer.sinkgd import balanced
from tests.knobs.test_optimizer_apollo import SHAPES, bytes_of_states, drawn, trained


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_papers_iteration(shape: tuple[int, ...]) -> None:
    weight, gradients = drawn(shape)
    wanted = weight.detach().clone()
    for gradient in gradients:
        update = gradient.flatten(1).clone()
        rows, columns = update.shape
        for _ in range(3):
            update = columns**0.5 * torch.diag(1 / update.norm(dim=1)) @ update
            update = rows**0.5 * update @ torch.diag(1 / update.norm(dim=0))
        wanted = wanted * (1 - 0.01 * 0.2) - 0.01 * 0.5 * update.view(shape)
    found = trained(SinkGD(lr=0.01, weight_decay=0.2, scale=0.5, iterations=3), weight, gradients)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def test_rows_and_columns_come_to_one_size_whatever_they_had() -> None:
    draw = torch.Generator().manual_seed(0)
    matrix = torch.randn(16, 24, generator=draw) * torch.logspace(-3, 3, 24) * torch.logspace(2, -2, 16)[:, None]
    found = balanced(matrix, 5)
    for dim in (0, 1):
        torch.testing.assert_close(found.square().mean(dim), torch.ones_like(found.mean(dim)), rtol=0.05, atol=0)


def test_rows_and_columns_of_zeros_stay() -> None:
    matrix = torch.ones(3, 4)
    matrix[1], matrix[:, 2] = 0, 0
    found = balanced(matrix, 5)
    assert found.isfinite().all()
    assert torch.equal(found == 0, matrix == 0)


@pytest.mark.parametrize("model", ["transformer", "resnet"])
def test_matrices_have_no_state(model: str) -> None:
    assert [num_bytes for num_bytes, *_ in bytes_of_states("sinkgd", model) if num_bytes] == []
