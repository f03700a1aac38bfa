"""The weights that a module holds at a forward pass, for its repetition: which tensors, whether they train, and how
often each was written to.

`torch.func.functional_call` gives a module other tensors for the time of a call, as models with fast weights do. And
some models let weights train in one call and not in the next.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import NamedTuple, final

from torch import Tensor, nn

from lowvram.compat.torch_autograd import version_of
from lowvram.compat.torch_modules import own_parameters


class Weight(NamedTuple):
    """A weight at a forward pass."""

    what: str  # for messages: "Linear.weight"
    owner: MutableMapping[str, Tensor | None]
    name: str
    tensor: Tensor
    requires_grad: bool
    version: int


@final
class Weights:
    """Those of modules, as they are now."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.weights = [
            Weight(type(module).__name__, own, name, weight, weight.requires_grad, version_of(weight))
            for module in modules
            for own in [own_parameters(module)]
            for name, weight in own.items()
            if weight is not None and not weight.is_inference()
        ]
        self.now: list[tuple[Weight, Tensor | None, bool]] = []

    def put_back(self) -> None:
        """Have the modules hold them again, and train those that trained. Keeps what is there now."""
        self.now = []
        for each in self.weights:
            present = each.owner.get(each.name)
            if present is not each.tensor or each.tensor.requires_grad != each.requires_grad:
                self.now.append((each, present, each.tensor.requires_grad))
                each.owner[each.name] = each.tensor
                if each.tensor.is_leaf:
                    each.tensor.requires_grad_(each.requires_grad)

    def take_away(self) -> None:
        """The inverse of `put_back`."""
        for each, present, requires_grad in reversed(self.now):
            each.owner[each.name] = present
            if each.tensor.is_leaf:
                each.tensor.requires_grad_(requires_grad)
        self.now = []

    def written(self) -> str | None:
        """One that was written to since, by its name."""
        weights = (each for each in self.weights if version_of(each.tensor) != each.version)
        return next((f"{each.what}.{each.name}" for each in weights), None)
