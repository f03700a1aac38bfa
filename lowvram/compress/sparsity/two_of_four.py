"""sparsity=two_of_four: of each four weights in a row the two smallest become 0, as sparse tensor cores want it.

Mishra et al., "Accelerating Sparse Deep Neural Networks" (2021): train, mask once, train on with the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from lowvram.compress.sparsity.masks import Mask, Rule, inputs_of
from lowvram.compress.sparsity.selection import rows_of
from lowvram.compress.sparsity.weights import Masked, check_time, step_at

GROUP = 4


@final
@dataclass(frozen=True)
class TwoOfFour(Masked):
    """The masks are set once and stay. A group of four lies along the inputs of a layer."""

    begin: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        check_time("begin", self.begin)

    @property
    def final_share(self) -> float:
        return 0.5

    def what_is_masked(self) -> str:
        return f"two of each four in the masked layers from {self.begin:.4g} of the steps on"

    def can_mask(self, layer: Any) -> bool:
        return super().can_mask(layer) and layer.weight.shape[inputs_of(layer)] % GROUP == 0

    def what_can_be_masked(self) -> str:
        return "whose weights train and whose number of inputs divides by four"

    def rule(self, masks: Sequence[Mask]) -> Rule:
        return Once(masks, step_at(self.begin, self.num_steps))


@final
class Once(Rule):
    """Sets the masks in one step."""

    def __init__(self, masks: Sequence[Mask], step: int) -> None:
        super().__init__(masks)
        self.step = step

    def begin(self, step: int) -> None:
        if step == self.step:
            for mask in self.masks:
                mask.change(smaller_half(mask.weight.detach(), mask.inputs))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is none."""


def smaller_half(weight: Tensor, inputs: int) -> Tensor:
    """Which elements are the two smallest of their group of four along the dimension `inputs` (bool). Of equal ones
    the last."""
    result = torch.empty_like(weight, dtype=torch.bool)
    for values, is_smaller in rows_of(weight.movedim(inputs, -1), result.movedim(inputs, -1)):
        order = values.abs().unflatten(-1, (-1, GROUP)).argsort(dim=-1, descending=True, stable=True)
        is_smaller.copy_((order.argsort(-1) >= GROUP // 2).flatten(-2))
    return result
