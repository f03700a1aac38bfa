"""ckpt=compiler: its budget, and why it is refused with dropout."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch_config

from lowvram.config.errors import BadInput, Incompatible
from lowvram.core.assemble import assemble
from lowvram.knobs.ckpt import (
    CompilerBudget,
)
from tests.laboratory import (
    CPU,
    PROBLEMS,
    compiler_as_before,
    knobs_of,
)


@pytest.mark.parametrize("budget", [-0.1, 1.0, float("nan")])
def test_a_budget_is_a_share(budget: float) -> None:
    with pytest.raises(BadInput, match=rf"ckpt\.budget={budget}: must be at least 0 .* and below 1"):
        CompilerBudget(budget)


def test_a_budget_with_dropout_is_refused() -> None:
    with pytest.raises(
        Incompatible,
        match=r"ckpt=compiler needs that the model draws no random numbers: \S+ \(Dropout\) does: .*dropout=0",
    ):
        assemble(PROBLEMS["transformer_dropout"], knobs_of(ckpt="compiler"), CPU)
    with compiler_as_before():
        assemble(PROBLEMS["transformer"], knobs_of(ckpt="compiler"), CPU)


def test_with_a_budget_gradients_would_be_of_another_mask() -> None:
    """The reason of that refusal, on torch 2.13: pytorch#190758. When this fails, torch has mended it."""
    x = torch.ones(64, 64, requires_grad=True)
    with compiler_as_before(), functorch_config.patch(activation_memory_budget=0.5):
        masked = torch.compile(lambda x: nn.functional.dropout(x.sin().cos(), 0.5), backend="aot_eager")(x)
        masked.sum().backward()
    assert x.grad is not None
    assert not torch.equal(masked == 0, x.grad == 0)
