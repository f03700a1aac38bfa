"""A survey of a model that somebody else wrote: which of its modules are repeated blocks, and which is its head.

It is read off one forward pass on tensors without memory: what a module keeps for the backward pass is what there is to
gain in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lowvram.compat.torch_fake import FakeTensorMode
from lowvram.compat.torch_modes import modes_lifted
from lowvram.compat.torch_trees import tree_map_only

CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # they have no forward pass
AS_MUCH = 0.9  # of what a class keeps: classes that keep less are parts of it
WORTH = 0.1  # of all that is kept: a second class of blocks holds at least so much


class FoundBlocks(NamedTuple):
    """Modules by their dotted names."""

    blocks: tuple[str, ...]  # in the order in which the forward pass first meets them
    head: str | None  # the linear layer whose outputs are the model's
    has_plain_blocks: bool  # blocks are called with tensors alone, by place, and return one


def find_blocks(
    model: nn.Module, call: Callable[[nn.Module, Any], Any], inputs: Any, named: str | None = None
) -> FoundBlocks:
    """Of a model on any device, whose own tensors stay as they are. Of one that can't run without values only the
    blocks are known whose class is named.

    Args:
        call: what makes the model's outputs of inputs.
        inputs: of two samples or more, on the CPU.
        named: the class of the blocks, if somebody knows it better.
    """
    try:
        with modes_lifted(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            notes = Notes(without_memory(model))
            outputs = notes.watched(call, tree_map_only(Tensor, mode.from_tensor, inputs))
    except Exception:
        names = {module: name for name, module in model.named_modules()}
        return FoundBlocks(tuple(names[module] for module in outermost(model, named)), None, False)
    kinds = [named] if named is not None else classes_of_blocks(notes)
    blocks = {module for kind in kinds for module in outermost(notes.model, kind)}
    order = [module for module in notes.order if module in blocks]
    heads = (notes.names[module] for module, output in notes.linear.items() if output is outputs)
    is_plain = all(notes.is_plain[module] for module in order)
    return FoundBlocks(tuple(notes.names[module] for module in order), next(heads, None), is_plain)


def outermost(model: nn.Module, kind: str | None) -> list[nn.Module]:
    """The modules of a class that lie in no other of that class."""
    if type(model).__name__ == kind:
        return [model]
    found = [module for child in model.children() for module in outermost(child, kind)]
    return list(dict.fromkeys(found))  # a module may have two parents


def repeated_classes(model: nn.Module) -> dict[str, int]:
    """The classes with several outermost members that are made of other modules, and how many they have."""
    names = {type(module).__name__ for module in model.modules() if is_composed(module)}
    counts = {name: len(outermost(model, name)) for name in sorted(names)}
    return {name: count for name, count in counts.items() if count > 1}


def without_memory(model: nn.Module) -> nn.Module:
    """A copy in training mode whose tensors are made anew where it is called."""
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        memo[id(tensor)] = nn.Parameter(like, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else like
    return deepcopy(model, memo).train()


@final
@dataclass
class Notes:
    """What is seen of a forward pass."""

    model: nn.Module
    running: list[nn.Module] = field(default_factory=list)  # the innermost last
    order: list[nn.Module] = field(default_factory=list)
    kept_bytes: dict[nn.Module, int] = field(default_factory=lambda: defaultdict(int))
    is_plain: dict[nn.Module, bool] = field(default_factory=lambda: defaultdict(lambda: True))
    linear: dict[nn.Linear, Any] = field(default_factory=dict)  # the last output of each
    kept: dict[int, Tensor] = field(default_factory=dict)  # by their storage, which so can't become another's

    def __post_init__(self) -> None:
        self.names = {module: name for name, module in self.model.named_modules()}

    def watched(self, call: Callable[[nn.Module, Any], Any], inputs: Any) -> Any:
        """The outputs of the model."""
        self.kept = {storage(parameter): parameter for parameter in self.model.parameters()}
        for module in self.names:
            module.register_forward_pre_hook(self.begin, with_kwargs=True)
            module.register_forward_hook(self.end)
        with saved_tensors_hooks(self.keep, lambda tensor: tensor):
            return call(self.model, inputs)

    def begin(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.running.append(module)
        self.is_plain[module] &= not named and all(isinstance(value, Tensor) for value in inputs)
        if module not in self.order:
            self.order.append(module)

    def end(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        self.running.pop()
        self.is_plain[module] &= isinstance(output, Tensor)
        if isinstance(module, nn.Linear):
            self.linear[module] = output

    def keep(self, tensor: Tensor) -> Tensor:
        if storage(tensor) not in self.kept:
            self.kept[storage(tensor)] = tensor
            for module in set(self.running):
                self.kept_bytes[module] += tensor.untyped_storage().nbytes()
        return tensor


def storage(tensor: Tensor) -> int:
    return id(tensor.untyped_storage())


class Candidate(NamedTuple):
    """A class of which there are several."""

    name: str
    modules: frozenset[nn.Module]
    kept_bytes: int


def classes_of_blocks(notes: Notes) -> list[str]:
    """The class that keeps most, and others beside it that keep much: encoder and decoder may have blocks of their own.
    Of classes that keep the same the one with more members: a stage keeps what its blocks do."""
    candidates = [candidate(notes, name) for name in repeated_classes(notes.model)]
    chosen: list[Candidate] = []
    while candidates:
        most_bytes = max(each.kept_bytes for each in candidates)
        if most_bytes <= WORTH * notes.kept_bytes[notes.model]:
            break
        equals = [each for each in candidates if each.kept_bytes >= AS_MUCH * most_bytes]
        best = max(equals, key=lambda each: len(each.modules))
        chosen.append(best)
        candidates = [each for each in candidates if not overlap(each, best)]
    return [each.name for each in chosen]


def candidate(notes: Notes, name: str) -> Candidate:
    modules = frozenset(outermost(notes.model, name))
    return Candidate(name, modules, sum(notes.kept_bytes[module] for module in modules))


def is_composed(module: nn.Module) -> bool:
    return not isinstance(module, CONTAINERS) and any(True for _ in module.children())


def overlap(one: Candidate, other: Candidate) -> bool:
    """Whether a module of one lies in a module of the other."""

    def lies_in(inner: Candidate, outer: Candidate) -> bool:
        within = {module for each in outer.modules for module in each.modules()}
        return not within.isdisjoint(inner.modules)

    return lies_in(one, other) or lies_in(other, one)
