"""Where two gradients meet, the ledger counts what autograd does without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lowvram.core.ledger import is_dense, ledger


class Sums(torch.autograd.Function):
    """Adds by itself in its backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        return gradient.clone() + gradient.clone()


class Starts(torch.autograd.Function):
    """Starts another backward pass in its own, in which two gradients meet."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> Tensor:
        leaf = torch.zeros(64, 64, requires_grad=True)
        with torch.enable_grad():
            x = leaf * 2
            torch.autograd.backward((x * 3).sum() + (x * 5).sum())
        return gradients[0]


MEETINGS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {  # and whether autograd adds in place
    "fresh": (lambda x: (x * 3).sum() + (x * 5).sum(), True),
    "three": (lambda x: (x * 3).sum() + (x * 5).sum() + (x * 7).sum(), True),
    "views": (lambda x: (x.t() * 3).sum() + (x.t() * 5).sum(), False),
    "expanded": (lambda x: x.sum() + x.sum(), False),
    "inside": (lambda x: Starts.apply(x).sum(), True),
    "none": (lambda x: Sums.apply(x).sum(), False),
}


@pytest.mark.parametrize(("loss", "in_place"), MEETINGS.values(), ids=MEETINGS)
def test_gradients_that_meet_are_added_as_autograd_does_it(
    loss: Callable[[Tensor], Tensor], in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a dispatch mode; under one it makes a new tensor each time."""

    def run() -> None:
        loss(torch.ones(64, 64, requires_grad=True) * 2).backward()

    with torch.profiler.profile(acc_events=True) as seen:
        run()
    assert ("aten::add_" in {event.name for event in seen.events() or ()}) is in_place
    with ledger() as peak:
        run()
    monkeypatch.setattr("lowvram.core.ledger.is_gradient_sum", lambda terms: False)
    with ledger() as naive:
        run()
    assert naive.peak_bytes - peak.peak_bytes == in_place * 64 * 64 * 4


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(()),
        torch.ones(2, 3, 4),
        torch.ones(2, 3, 4).permute(2, 0, 1),
        torch.ones(2, 3, 4)[:, :1],
        torch.ones(2, 3, 4)[:1],
        torch.ones(2, 3, 4)[..., ::2],
        torch.ones(1, 3).expand(2, 3),
        torch.ones(6).as_strided((2, 3), (1, 1)),
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.ones(3, 0, 2),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}{tensor.stride()}",
)
def test_density_is_what_torch_calls_so(tensor: Tensor) -> None:
    assert is_dense(tensor) is torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
