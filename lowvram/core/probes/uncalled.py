"""Finds out by trial with which layers' weights a model computes otherwise than by calling the layer, as in
`F.linear(x, self.up.weight)`. What is put in the layer's place, such as one with an adapter, has no effect there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from torch import Tensor, UntypedStorage, nn

from lowvram.compat.torch_autograd import current_node
from lowvram.compat.torch_modes import TorchDispatchMode
from lowvram.compat.torch_trees import tree_leaves
from lowvram.core.probes.fake_pass import tried
from lowvram.core.structure import Probe, Structure


@final
@dataclass(frozen=True)
class Uncalled(Probe[frozenset[str]]):
    """The names of layers with whose weights a forward pass computes without calling them, as far as it is known."""

    def find(self, known: Structure) -> frozenset[str]:
        def watched(copy: nn.Module, fake: Any) -> frozenset[str]:
            weights = {
                name: weight.untyped_storage()
                for name, module in copy.named_modules()
                if (weight := dict(module.named_parameters(recurse=False)).get("weight")) is not None
            }
            used = Used(weights.values())
            for module in copy.modules():
                own = {id(tensor.untyped_storage()) for tensor in module.parameters(recurse=False)}
                module.register_forward_pre_hook(partial(used.begin, own))  # after the hooks of others
                module.register_forward_hook(used.end, prepend=True)  # before them
            with used:
                known.call(copy, fake)
            return frozenset(name for name, storage in weights.items() if id(storage) in used.found)

        unknown = "whether it calls each layer; an adapter or qat has no effect on a layer whose weight it only reads"
        return tried(known.model, watched, known.short_example(2), unknown, frozenset())


@final
class Used(TorchDispatchMode):
    """Notes which weights operators are given while no module computes that has the weight itself.

    Args:
        weights: their memory, kept, so that its ids aren't used again.
    """

    def __init__(self, weights: Iterable[UntypedStorage]) -> None:
        super().__init__()
        self.weights = {id(storage): storage for storage in weights}
        self.running: list[set[int]] = []  # what the modules have that compute, the innermost last
        self.found: set[int] = set()

    def begin(self, own: set[int], *_: Any) -> None:
        self.running.append(own)

    def end(self, *_: Any) -> None:
        self.running.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if current_node() is not None:  # of a call's own gradients, as those of an energy
            return func(*args, **(kwargs or {}))
        given = (id(each.untyped_storage()) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
        self.found |= {place for place in given if place in self.weights}.difference(*self.running)
        return func(*args, **(kwargs or {}))
