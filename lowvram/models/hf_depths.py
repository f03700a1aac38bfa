"""Finds how the configuration of a model of transformers says how many blocks there are, and which layers of a block
must be zero for it to hand on what it is given.

No list of families: a field counts if the model with another value, made without memory, has more of the same blocks
and else the same tensors. Layers count if a block of the trained model, run alone, then returns its inputs; that the
whole deeper model computes what the trained one does is checked, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lowvram.compat.torch_trees import tree_leaves, tree_map_only
from lowvram.config.settings import GrowthKind
from lowvram.models.growth import TENSORS, Copied, Source, copied_tensors, sources, values_of
from lowvram.models.hf_widths import Shapes, Sizes
from lowvram.models.proof import Call, computed, copied, in_fp64, without_weights

Lists = dict[str, list[Source]]  # of lists of blocks, by their names, what the blocks of the deeper model are made from
NO_DEPTH = "no field of its configuration is their number and nothing else"
CLOSE = 1e-12  # how far what two models compute in fp64 may differ, relative to the largest
NOT_IDLE = "its blocks change what they are given even if all their layers are zero"


class Depth(NamedTuple):
    """How a configuration makes a model deeper.

    Attributes:
        lists: the lists of blocks that become longer.
        sizes: the fields of the configuration, with the values that make it so.
        gone: tensors that a copy of a block lacks: the first block of T5 has biases for all of them.
        left: sentences: which lists stay as they are.
    """

    lists: Lists
    sizes: Sizes
    gone: set[str]
    left: list[str]

    def tensors(self, names: Iterable[str], zero: Mapping[str, Sequence[str]]) -> dict[str, Copied]:
        """Where each tensor of the deeper model comes from, by its name.

        Args:
            names: of the trained model's tensors.
            zero: of lists of blocks the layers that are zero in idle ones.
        """
        tensors = copied_tensors(names, self.lists, zero)
        return {name: each for name, each in tensors.items() if name not in self.gone}


def deeper(
    values: Mapping[str, Any],
    shapes: Callable[[Sizes], Shapes | None],
    blocks: Iterable[str],
    factor: int,
    how: GrowthKind,
) -> Depth:
    """How all blocks are there `factor` times.

    Args:
        values: the fields of the configuration.
        shapes: of the model with other values, by the names of its tensors; None if there is no such model.
        blocks: the names of the model's blocks.
    """
    before, depth = shapes({}) or {}, Depth({}, {}, set(), [])
    for name, length in lists_of(blocks).items():
        copies = sources([range(length)], length, factor, how)
        fits = partial(is_longer, before, name, copies)
        tried = ((sizes, shapes(sizes)) for sizes in candidates(values, length, copies))
        sizes, after = next(((sizes, after) for sizes, after in tried if after and fits(after)), (None, {}))
        if sizes is None:
            depth.left.append(f"{length} blocks in {name}: {NO_DEPTH}")
        else:
            depth.lists[name] = copies
            depth.sizes.update(sizes)
            depth.gone.update(copied_tensors(before, {name: copies}, {}).keys() - after.keys())
    return depth


def lists_of(blocks: Iterable[str]) -> dict[str, int]:
    """The lists whose elements are blocks, by their names, and how long they are."""
    numbers: dict[str, set[str]] = defaultdict(set)
    for block in blocks:
        name, _, number = block.rpartition(".")
        numbers[name].add(number)
    return {name: len(found) for name, found in numbers.items() if found == set(map(str, range(len(found))))}


def candidates(values: Mapping[str, Any], length: int, copies: Sequence[Source]) -> Iterator[Sizes]:
    """Each field with the value `length`, longer: alone, then with those lists longer that have an entry for each
    block, such as `layer_types`."""
    of_each = {name: value for name, value in values.items() if isinstance(value, list) and len(value) == length}
    longer = {name: [entries[source.block] for source in copies] for name, entries in of_each.items()}
    for lists in ({}, longer) if longer else ({},):
        yield from ({name: len(copies), **lists} for name, value in values.items() if is_number(value, length))


def is_number(value: Any, number: int) -> bool:
    return type(value) is int and value == number


def is_longer(before: Shapes, blocks: str, copies: Sequence[Source], after: Shapes) -> bool:
    """Whether a model differs from the trained one in the length of a list of blocks alone."""
    known = copied_tensors(before, {blocks: copies}, {})
    return (
        any(name.startswith(f"{blocks}.{len(copies) - 1}.") for name in after)
        and before.keys() <= after.keys() <= known.keys()
        and all(shape == before[known[name].name] for name, shape in after.items())
    )


def proven_last_layers(
    call: Call, trained: nn.Module, make: Callable[[], nn.Module], inputs: Any, depth: Depth
) -> dict[str, list[str]]:
    """Of each list of blocks the layers that are zero in idle ones. On the CPU, which holds all weights in fp64.

    Args:
        make: the deeper model, on the CPU; its tensors hold any values.
        inputs: of a few samples, on the CPU.

    Raises:
        ValueError: there are no such layers.
    """
    deep = without_weights(make())
    large, few = copied(trained), tree_map_only(Tensor, in_fp64, inputs)
    zero, state = last_layers(call, large, depth.lists, few), large.state_dict(keep_vars=True)
    instead = values_of(depth.tensors(state, zero), state)
    if not is_close(computed(call, deep, instead, few), computed(call, large, {}, few)):
        raise ValueError(NOT_IDLE)
    return zero


class Visit(NamedTuple):
    """How a block was called, and the names of its layers with weights in the order in which they were."""

    args: tuple[Any, ...]
    named: dict[str, Any]
    layers: list[str]


def last_layers(call: Call, model: nn.Module, lists: Iterable[str], inputs: Any) -> dict[str, list[str]]:
    """Of each list of blocks the layers that make its first one hand on what it is given if they are zero: as few as
    possible, and the last ones.

    Args:
        model: in fp64, in evaluation mode.

    Raises:
        ValueError: there are none.
    """
    firsts = {name: model.get_submodule(f"{name}.0") for name in lists}
    found = dict[str, list[str]]()
    for name, visit in visits(call, model, firsts, inputs).items():
        zero = list(dict.fromkeys(visit.layers))
        if not hands_on(firsts[name], visit, zero):
            raise ValueError(NOT_IDLE)
        for layer in list(zero):
            fewer = [each for each in zero if each != layer]
            if hands_on(firsts[name], visit, fewer):
                zero = fewer
        found[name] = zero
    return found


def visits(call: Call, model: nn.Module, blocks: Mapping[str, nn.Module], inputs: Any) -> dict[str, Visit]:
    """How the model calls these blocks."""
    found = dict[str, Visit]()
    with ExitStack() as hooks:
        for name, block in blocks.items():
            layers = list[str]()
            handles = [
                module.register_forward_hook(partial(note, layers, inner))
                for inner, module in block.named_modules()
                if isinstance(getattr(module, "weight", None), nn.Parameter)
            ]

            def begin(_: nn.Module, args: Any, named: Any, name: str = name, layers: list[str] = layers) -> None:
                found[name] = Visit(args, named, layers)

            handles.append(block.register_forward_pre_hook(begin, with_kwargs=True))
            for handle in handles:
                hooks.callback(handle.remove)
        computed(call, model, {}, inputs)
    return found


def note(layers: list[str], name: str, *_: Any) -> None:
    layers.append(name)


@torch.no_grad()
def hands_on(block: nn.Module, visit: Visit, zero: Sequence[str]) -> bool:
    """Whether a block returns what it is given if these layers are zero."""
    names = {f"{layer}.{tensor}" for layer in zero for tensor in TENSORS}
    zeros = {name: torch.zeros_like(weight) for name, weight in block.named_parameters() if name in names}
    given, *_ = (each for each in tree_leaves((visit.args, visit.named)) if isinstance(each, Tensor))
    returned, *_ = tree_leaves(functional_call(block, zeros, visit.args, visit.named))
    return is_close(returned, given)


def needed_bytes(model: nn.Module) -> int:
    """The host memory that `proven_last_layers` takes, without activations and zeros."""
    return torch.float64.itemsize * sum(each.numel() for each in model.parameters())


def is_close(ours: Tensor, theirs: Tensor) -> bool:
    return ours.shape == theirs.shape and bool(((ours - theirs).abs().max() <= CLOSE * theirs.abs().max()).item())
