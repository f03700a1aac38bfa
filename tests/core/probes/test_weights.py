"""Facts about weights: which can't be sharded, are complex, or share memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lowvram.core.probes.weights import REAL_WEIGHTS, SEPARATE_MEMORY, unshardable
from lowvram.core.structure import Structure


class Counted(nn.Linear):
    """A block that counts how often its parameters are listed."""

    times = 0

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        Counted.times += 1
        return super().parameters(recurse)


def test_the_weights_of_blocks_are_counted_once() -> None:
    model, Counted.times = nn.Sequential(*(Counted(2, 2) for _ in range(50))), 0
    assert unshardable(model, [*model]) is None
    assert Counted.times == 50
    model[7].weight = model[8].weight
    assert "7.weight is in 2 blocks" in str(unshardable(model, [*model]))


def test_a_weight_of_a_block_that_a_layer_outside_has_too_cannot_be_sharded() -> None:
    """FSDP2 has a traceback for it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    blocks = [model[1], model[2]]
    assert unshardable(model, blocks) is None
    model[0].weight = model[2].weight
    assert "0.weight is in a block, and 0, outside of the blocks, has it, too" in str(unshardable(model, blocks))
    model.weight = model[1].weight
    assert "the model itself, outside of the blocks" in str(unshardable(model, blocks[:1]))


def test_complex_weights_and_shared_memory_are_named() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 3))
    known = Structure(model, lambda model, inputs: model(inputs), torch.zeros, torch.zeros)
    assert (REAL_WEIGHTS.lack(known), SEPARATE_MEMORY.lack(known)) == (None, None)
    model.transposed = nn.Parameter(model[0].weight.detach().t())
    model.phase = nn.Parameter(torch.tensor([1.0 + 1.0j]))
    assert "phase is" in str(REAL_WEIGHTS.lack(known))
    assert "0.weight and transposed do" in str(SEPARATE_MEMORY.lack(known))
