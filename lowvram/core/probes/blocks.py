"""Finds the repeated blocks and the head of a third-party model.

Runs one forward pass on fake tensors, and compares how much memory the modules save for the backward pass: that is what
checkpointing them can free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, final

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lowvram.config.errors import BadInput
from lowvram.config.texts import first_line
from lowvram.core.probes.fake_pass import fake_pass, without_memory
from lowvram.core.probes.head import find_head
from lowvram.core.probes.last_weights import last_weights

CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # they have no forward pass
AS_MUCH = 0.9  # classes that save at least this share of what the class with the most saves count as equal to it
WORTH = 0.1  # a class of blocks must save more than this share of what the model saves


class FoundBlocks(NamedTuple):
    """Modules by their dotted names."""

    blocks: tuple[str, ...]  # in the order in which the forward pass first meets them
    head: str | None  # the linear layer whose products the model returns as they are (head.py)
    has_plain_blocks: bool  # blocks take only tensors, as positional arguments, and return one tensor
    last: tuple[str, ...] = ()  # the weights of the layers that make the outputs, by all of their names; empty: unknown
    trouble: str | None = None  # why the model can't run on fake tensors


def find_blocks(
    model: nn.Module,
    call: Callable[[nn.Module, Any], Any],
    inputs: Any,
    named: str | None = None,
    *,
    asks_head: bool = True,
) -> FoundBlocks:
    """Find the blocks and the head of a model on any device, without changing it. If the model can't run on fake
    tensors, only the blocks are found, and only if `named` names their class.

    Args:
        call: calls the model on inputs and returns its outputs, or those that the criterion reads.
        inputs: of two samples or more, on the CPU.
        named: the class name of the blocks, if the user gave it.
        asks_head: whether the head is looked for, which takes two passes more.

    Raises:
        BadInput: the model can't be called on such inputs.
    """
    try:
        record, outputs, head = fake_pass(model, partial(recorded, call, asks_head), inputs)
    except BadInput:  # the model can't be called on such data, with or without memory
        raise
    except Exception as error:
        names = {module: name for name, module in model.named_modules()}
        trouble = f"{type(error).__name__}: {first_line(error)}"
        return FoundBlocks(tuple(names[module] for module in outermost(model, named)), None, False, trouble=trouble)
    kinds = [named] if named is not None else classes_of_blocks(record)
    blocks = {module for kind in kinds for module in outermost(record.model, kind)}
    order = [module for module in record.order if module in blocks]
    is_plain = all(record.is_plain[module] for module in order)
    last = {id(weight) for weight in last_weights(outputs)}
    named_weights = record.model.named_parameters(remove_duplicate=False)
    names = tuple(name for name, weight in named_weights if id(weight) in last)
    return FoundBlocks(tuple(record.names[module] for module in order), head, is_plain, names)


def recorded(
    call: Callable[[nn.Module, Any], Any], asks_head: bool, model: nn.Module, inputs: Any
) -> tuple[ForwardRecord, Any, str | None]:
    """What a forward pass shows, its outputs, and the name of the head."""
    fresh, record = without_memory(model) if asks_head else None, ForwardRecord(model)
    outputs = record.watched(call, inputs)
    try:
        return record, outputs, None if fresh is None else find_head(fresh, call, inputs)
    except Exception:  # of code that we don't know, in evaluation mode: then no head is known
        return record, outputs, None


def outermost(model: nn.Module, kind: str | None) -> list[nn.Module]:
    """The modules of a class that aren't inside another module of that class."""
    if type(model).__name__ == kind:
        return [model]
    modules = [module for child in model.children() for module in outermost(child, kind)]
    return list(dict.fromkeys(modules))  # without duplicates: a module may have two parents


def repeated_classes(model: nn.Module) -> dict[str, int]:
    """The classes of which the model has several outermost modules with children, and how many."""
    names = {type(module).__name__ for module in model.modules() if is_composed(module)}
    counts = {name: len(outermost(model, name)) for name in sorted(names)}
    return {name: count for name, count in counts.items() if count > 1}


@final
@dataclass
class ForwardRecord:
    """What one forward pass shows about the modules of a model."""

    model: nn.Module
    running: list[nn.Module] = field(default_factory=list)  # the innermost last
    order: list[nn.Module] = field(default_factory=list)
    kept_bytes: dict[nn.Module, int] = field(default_factory=lambda: defaultdict(int))
    num_calls: dict[nn.Module, int] = field(default_factory=lambda: defaultdict(int))
    is_plain: dict[nn.Module, bool] = field(default_factory=lambda: defaultdict(lambda: True))
    kept: dict[int, Tensor] = field(default_factory=dict)  # by id of the storage; kept alive so that no id is reused

    def __post_init__(self) -> None:
        self.names = {module: name for name, module in self.model.named_modules()}

    def watched(self, call: Callable[[nn.Module, Any], Any], inputs: Any) -> Any:
        """Run the model, recording; returns its outputs."""
        self.kept = {storage(parameter): parameter for parameter in self.model.parameters()}
        for module in self.names:
            module.register_forward_pre_hook(self.begin, with_kwargs=True)
            module.register_forward_hook(self.end)
        with saved_tensors_hooks(self.keep, lambda tensor: tensor):
            return call(self.model, inputs)

    def begin(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.running.append(module)
        self.is_plain[module] &= not named and all(isinstance(value, Tensor) for value in inputs)
        self.num_calls[module] += 1
        if module not in self.order:
            self.order.append(module)

    def end(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        self.running.pop()
        self.is_plain[module] &= isinstance(output, Tensor)

    def keep(self, tensor: Tensor) -> Tensor:
        if storage(tensor) not in self.kept:
            self.kept[storage(tensor)] = tensor
            for module in set(self.running):
                self.kept_bytes[module] += tensor.untyped_storage().nbytes()
        return tensor


def storage(tensor: Tensor) -> int:
    return id(tensor.untyped_storage())


class Candidate(NamedTuple):
    """A class of repeated modules."""

    name: str
    modules: frozenset[nn.Module]
    kept_bytes: int


def classes_of_blocks(record: ForwardRecord) -> list[str]:
    """The class, or the few classes that don't overlap, whose modules save the most memory for the backward pass. A
    model's encoder and decoder may have different blocks, and a class of layers in all of them is no better than these.
    Of what saves about the same, the fewest classes win, since a block saves as much as its layers, and among these the
    most modules, since a stage saves as much as its blocks."""
    least = WORTH * record.kept_bytes[record.model]
    made = [make_candidate(record, name) for name in repeated_classes(record.model)]
    candidates = [candidate for candidate in made if candidate.kept_bytes > least]
    if not candidates:  # one block may be called several times, as in ALBERT
        made = [make_candidate(record, name) for name in classes_called_again(record)]
        candidates = [candidate for candidate in made if candidate.kept_bytes > least]
    if not candidates:
        return []
    choices = [with_others(first, candidates) for first in candidates]
    most_bytes = max(map(total_bytes, choices))
    equals = [choice for choice in choices if total_bytes(choice) >= AS_MUCH * most_bytes]
    best = min(equals, key=lambda choice: (len(choice), -sum(len(candidate.modules) for candidate in choice)))
    return [candidate.name for candidate in best]


def classes_called_again(record: ForwardRecord) -> list[str]:
    """The classes of modules with children that the forward pass calls more than once."""
    called = (module for module, count in record.num_calls.items() if count > 1 and is_composed(module))
    return list(dict.fromkeys(type(module).__name__ for module in called))


def with_others(first: Candidate, candidates: list[Candidate]) -> list[Candidate]:
    """A candidate, and those that overlap neither it nor each other, the ones that save most first."""
    chosen = [first]
    for other in sorted(candidates, key=lambda candidate: -candidate.kept_bytes):
        if not any(overlap(other, each) for each in chosen):
            chosen.append(other)
    return chosen


def total_bytes(candidates: list[Candidate]) -> int:
    return sum(candidate.kept_bytes for candidate in candidates)


def make_candidate(record: ForwardRecord, name: str) -> Candidate:
    modules = frozenset(outermost(record.model, name))
    return Candidate(name, modules, sum(record.kept_bytes[module] for module in modules))


def is_composed(module: nn.Module) -> bool:
    return not isinstance(module, CONTAINERS) and any(True for _ in module.children())


def overlap(one: Candidate, other: Candidate) -> bool:
    """Whether a module of one candidate is inside a module of the other."""

    def lies_in(inner: Candidate, outer: Candidate) -> bool:
        within = {module for root in outer.modules for module in root.modules()}
        return not within.isdisjoint(inner.modules)

    return lies_in(one, other) or lies_in(other, one)
