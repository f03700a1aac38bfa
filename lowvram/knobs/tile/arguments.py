"""A block as a function of those of its arguments that are cut into chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lowvram.compat.torch_trees import tree_unflatten


class Arguments(NamedTuple):
    """What a block is called with.

    Args:
        leaves, nesting: of (arguments by position, by name).
        places: of the leaves that are cut.
        num_outputs: of the block: 0 for a tensor, else the length of a tuple that begins with one and else holds None.
    """

    leaves: Sequence[Any]
    nesting: Any
    places: Sequence[int]
    num_outputs: int

    @property
    def tensors(self) -> list[Tensor]:
        return [self.leaves[place] for place in self.places]

    def given_chunks(self, call: Callable[..., Any]) -> Callable[..., Tensor]:
        """The block's call as a function of a chunk of each of the tensors, which returns one tensor. It doesn't keep
        the tensors themselves."""
        _, nesting, places, num_outputs = self
        others = [None if place in places else leaf for place, leaf in enumerate(self.leaves)]

        def call_with(*chunk: Tensor) -> Tensor:
            leaves = list(others)
            for place, tensor in zip(places, chunk, strict=True):
                leaves[place] = tensor
            inputs, named = tree_unflatten(leaves, nesting)
            output = call(*inputs, **named)
            return output[0] if num_outputs else output

        return call_with

    def returned(self, whole: Tensor) -> Any:
        """What the block returns."""
        return (whole, *[None] * (self.num_outputs - 1)) if self.num_outputs else whole
