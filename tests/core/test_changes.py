"""What a forward pass changes beside what it returns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lowvram.config.errors import Incompatible
from lowvram.core.changes import LARGE_BYTES, Look
from lowvram.core.places import Places
from lowvram.core.repeat import Repeatable


def test_a_large_tensor_that_changes_late_names_all_options_that_have_to_undo_it() -> None:
    module = nn.Module()
    module.register_buffer("codes", torch.zeros(LARGE_BYTES // 4 + 1))
    places = Places(module)
    assert Look(places).changes() == []
    look = Look(places)
    module.get_buffer("codes").add_(1)
    with pytest.raises(
        Incompatible, match=r"^Module\.codes was changed.*\(ckpt, tile, .*torchscript, .*zeroth_order\)$"
    ):
        look.changes()


class Table(nn.Module):
    def __init__(self, step: float) -> None:
        super().__init__()
        self.held, self.step = {"table": np.zeros(LARGE_BYTES // 8 + 1)}, step

    def forward(self, x: Tensor) -> Tensor:
        self.held["table"][-1] += self.step
        return x * self.held["table"][-1]


def test_a_large_array_that_changes_cannot_be_put_back() -> None:
    for step in (0.0, 1.0):
        module = Table(step)
        first, again = Repeatable(module).passes()
        with first:
            module(torch.ones(1))
        if not step:
            with again:
                module(torch.ones(1))
            continue
        with pytest.raises(Incompatible, match=r"^Table\.held, an array of numpy, is changed in place"), again:
            module(torch.ones(1))
