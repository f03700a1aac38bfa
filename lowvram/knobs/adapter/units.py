"""The units of a model that train or rest together: what comes before its blocks, each block, and what follows them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import final

from torch import nn

from lowvram.compat.torch_modules import BatchNorm
from lowvram.core.trainable import rest, wake
from lowvram.knobs.adapter.parts import keep_in_eval, let_train

BEFORE = 0  # the number of the unit before the blocks; the blocks follow, and after the last one the rest of the model


@final
class Units:
    """All parameters of a model that aren't frozen, in units.

    A parameter outside the blocks belongs to the unit in front of the first block if the model names it before that
    block's parameters (embeddings, stem), to a later block if it names it between two, else to the last unit (norm,
    head). A weight that the head shares with the embedding belongs where the embedding does.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self.parameters: list[list[nn.Parameter]] = [[] for _ in range(len(blocks) + 2)]
        in_blocks = {
            parameter: number
            for number, block in reversed(list(enumerate(blocks, start=1)))  # a shared one belongs to its first block
            for parameter in block.parameters()
        }
        last = max(in_blocks.values(), default=BEFORE)
        latest, unit_of = BEFORE, dict[nn.Parameter, int]()
        between = list[nn.Parameter]()  # outside the blocks, since the last parameter of one
        for parameter in model.parameters():
            if parameter in in_blocks:
                latest = max(latest, in_blocks[parameter])
                unit_of |= dict.fromkeys(between, BEFORE if latest == 1 else latest)
                unit_of[parameter], between = in_blocks[parameter], []
            else:
                between.append(parameter)
        unit_of |= dict.fromkeys(between, last + 1)
        for parameter, unit in unit_of.items():
            if parameter.requires_grad:
                self.parameters[unit].append(parameter)
        self.norms = {
            module: {unit_of[weight] for weight in module.parameters(False)}
            for module in model.modules()
            if isinstance(module, BatchNorm)
        }

    @property
    def sizes(self) -> list[int]:
        """The elements of each unit's parameters."""
        return [sum(parameter.numel() for parameter in unit) for unit in self.parameters]

    def let_train(self, active: Collection[int]) -> list[nn.Parameter]:
        """Wake the parameters of these units and have all others rest; returns those that rest. BatchNorm whose weights
        rest stays in evaluation mode, so that its running statistics don't change."""
        resting = [parameter for unit, own in enumerate(self.parameters) if unit not in active for parameter in own]
        for unit in active:
            for parameter in self.parameters[unit]:
                wake(parameter)
        for parameter in resting:
            rest(parameter)
        for norm, units in self.norms.items():
            change = keep_in_eval if units and units.isdisjoint(active) else let_train
            change(norm)
        return resting
