"""Private names of torch.optim."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lowvram.compat.replaced import replaced
from lowvram.compat.torch_fake import FakeTensor

CHOICE = "_default_to_fused_or_foreach"


@contextmanager
def foreach_chosen_by(is_on_card: Callable[[Tensor], bool]) -> Iterator[None]:
    """Inside it, torch's optimizers that were told neither choose between a loop over parameters and operators on lists
    of tensors (`foreach`), which take memory for temporaries of all parameters, as with parameters on a card.

    torch.optim's _default_to_fused_or_foreach and _foreach_supported_types, since 2.0: the choice is documented, but it
    asks each tensor for its device, and its class, which in a plan is that of fake tensors. Replaced by nothing, once
    plans have tensors that claim to be on a card.

    Args:
        is_on_card: whether a parameter is on the card, and not in host memory.
    """
    supported = {FakeTensor, *vars(sys.modules[Optimizer.__module__])["_foreach_supported_types"]}

    def choice(params: list[Any], differentiable: bool, use_fused: bool = False) -> tuple[bool, bool]:
        are_on_card = all(each is None or (type(each) in supported and is_on_card(each)) for each in params)
        can_fuse = all(each is None or each.is_floating_point() for each in params)
        is_fused = use_fused and are_on_card and can_fuse and not differentiable
        return is_fused, are_on_card and not (differentiable or is_fused)

    with ExitStack() as undo:
        for name, module in [*sys.modules.items()]:
            if name.startswith("torch.optim.") and CHOICE in vars(module):
                undo.enter_context(replaced(module, CHOICE, choice))
        yield
