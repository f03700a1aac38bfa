"""Finds how the configuration of a model of transformers says how many blocks there are, and which layers of a block
must be zero for it to hand on what it is given.

No list of families: a field counts if the model with another value has more of the same blocks and else the same
tensors. Layers count if a block of the trained model, run alone, then returns its inputs; that the whole deeper model
computes what the trained one does is checked, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lowvram.compat.torch_trees import tree_leaves, tree_map_only
from lowvram.config.transforms import GrowthKind
from lowvram.core.probes.blocks import is_composed
from lowvram.core.probes.fake_pass import fake_pass
from lowvram.models.growth import TENSORS, Copied, Source, copied_tensors, sources, values_of
from lowvram.models.hf_widths import Shapes, Sizes
from lowvram.models.proof import Call, computed, fp64_copy, in_fp64, without_weights

Lists = dict[str, list[Source]]  # of lists of blocks, by their names, what the blocks of the deeper model are made from
NO_DEPTH = "no field of its configuration is their number and nothing else"
CLOSE = 1e-12  # how far what two models compute in fp64 may differ, relative to the largest
NOT_IDLE = "its blocks change what they are given even if all their layers are zero"
BY_PLACE = "what its blocks compute depends on their place, which copies in between change"


class NotIdle(Exception):
    """No layers make the copies of blocks hand on what they are given. The message says why."""


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

    def tensors(self, names: Iterable[str], last_layers: Mapping[str, Sequence[str]]) -> dict[str, Copied]:
        """Where each tensor of the deeper model comes from, by its name; as `copied_tensors`."""
        tensors = copied_tensors(names, self.lists, last_layers)
        return {name: each for name, each in tensors.items() if name not in self.gone}


def find_depth(
    model: nn.Module,
    values: Mapping[str, Any],
    shapes: Callable[[Sizes], Shapes | None],
    factor: int,
    how: GrowthKind,
) -> Depth:
    """How all blocks are there `factor` times.

    Args:
        values: the fields of the model's configuration.
        shapes: of the model with other values, by the names of its tensors; None if there is no such model.
    """
    before, depth = shapes({}), Depth({}, {}, set(), [])
    for name, length in lists_of(model).items():
        made_from = sources([range(length)], length, factor, how)
        fits = partial(is_longer, before or {}, name, made_from)
        tried = (sizes for sizes in candidates(values, length, made_from) if fits(shapes(sizes)))
        sizes = next(tried, None)
        if sizes is None:
            depth.left.append(f"{length} modules in {name}: {NO_DEPTH}")
            continue
        for field in [field for field in sizes if isinstance(sizes[field], list)]:
            fewer = {other: value for other, value in sizes.items() if other != field}
            sizes = fewer if fits(shapes(fewer)) else sizes
        depth.lists[name] = made_from
        depth.sizes.update(sizes)
        known = copied_tensors(before or {}, {name: made_from}, {})
        depth.gone.update(known.keys() - (shapes(sizes) or {}).keys())
    return depth


def lists_of(model: nn.Module) -> dict[str, int]:
    """The outermost lists of modules that have modules in them, by their names, and how long they are."""
    found = dict[str, int]()
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{other}.") for other in found)
        if isinstance(module, nn.ModuleList) and len(module) and not is_inside and all(map(is_composed, module)):
            found[name] = len(module)
    return found


def candidates(values: Mapping[str, Any], length: int, made_from: Sequence[Source]) -> Iterator[Sizes]:
    """Each field with the value `length` as the deeper model would have it: alone, then beside a list with an entry for
    each block, such as `layer_types`, which is also tried by itself, then beside all of these lists."""
    of_each = {name: value for name, value in values.items() if isinstance(value, list) and len(value) == length}
    longer = {name: [entries[source.block] for source in made_from] for name, entries in of_each.items()}
    numbers = [name for name, value in values.items() if type(value) is int and value == length]
    single = [{name: entries} for name, entries in longer.items()]
    for lists in [{}, *single, *([longer] if len(longer) > 1 else [])]:
        if lists:
            yield lists
        yield from ({number: len(made_from), **lists} for number in numbers)


def is_longer(before: Shapes, blocks: str, made_from: Sequence[Source], after: Shapes | None) -> bool:
    """Whether a model differs from the trained one in the length of a list of blocks alone. Copies may lack a tensor of
    their block, if the first of them has it."""
    known = copied_tensors(before, {blocks: made_from}, {})
    firsts = {each.name: name for name, each in reversed(known.items())}.values()
    return (
        after is not None
        and any(name.startswith(f"{blocks}.{len(made_from) - 1}.") for name in after)
        and set(firsts) <= after.keys() <= known.keys()
        and all(shape == before[known[name].name] for name, shape in after.items())
    )


def runs_all(call: Call, trained: nn.Module, deep: nn.Module, inputs: Any, lists: Lists) -> bool:
    """Whether a forward pass of the deeper model runs all of its blocks. It runs on fake tensors; also true if the
    trained model can't."""
    try:
        fake_pass(trained, call, inputs)
    except Exception:
        return True
    try:
        ran = fake_pass(deep, partial(modules_that_run, call), inputs)
    except Exception:
        return False
    return all(f"{name}.{number}" in ran for name, made_from in lists.items() for number in range(len(made_from)))


def modules_that_run(call: Call, model: nn.Module, inputs: Any) -> list[str]:
    ran = list[str]()
    for name, module in model.named_modules():
        module.register_forward_pre_hook(partial(note, ran, name))
    call(model, inputs)
    return ran


def note(names: list[str], name: str, *_: Any) -> None:
    names.append(name)


def needed_bytes(model: nn.Module, tensors: Mapping[str, Copied]) -> int:
    """The host memory that `proven_last_layers` takes, without activations: for the deeper model as it is made, then
    for the trained one in fp64."""
    weights = {name: each.numel() for name, each in model.named_parameters()}
    num_deeper = sum(weights.get(each.name, 0) for each in tensors.values())
    return max(torch.float32.itemsize * num_deeper, torch.float64.itemsize * sum(weights.values()))


def proven_last_layers(
    call: Call, trained: nn.Module, make: Callable[[], nn.Module], inputs: Any, depth: Depth
) -> dict[str, list[str]]:
    """Of blocks, by their names, the layers that are zero where one is idle. Computes on the CPU.

    Args:
        make: the deeper model, on the CPU; its tensors hold any values.
        inputs: of a few samples, on the CPU.

    Raises:
        NotIdle: there are no such layers.
    """
    deep = without_weights(make())
    large, few = fp64_copy(trained), tree_map_only(Tensor, in_fp64, inputs)
    last, state = last_layers(call, large, depth.lists, few), large.state_dict(keep_vars=True)
    instead = values_of(depth.tensors(state, last), state)
    if not is_close(computed(call, deep, instead, few), computed(call, large, {}, few)):
        raise NotIdle(BY_PLACE)
    return last


def last_layers(call: Call, model: nn.Module, lists: Iterable[str], inputs: Any) -> dict[str, list[str]]:
    """Of blocks, by their names, the layers that make one hand on what it is given if they are zero: as few as
    possible, and the last ones. Of blocks with tensors of the same names one is tried.

    Args:
        model: in fp64, in evaluation mode.

    Raises:
        NotIdle: there are none.
    """
    blocks = {
        f"{name}.{number}": block for name in lists for number, block in model.get_submodule(name).named_children()
    }
    kinds = {block: (block.rpartition(".")[0], *dict(module.named_parameters())) for block, module in blocks.items()}
    firsts = {kind: block for block, kind in reversed(kinds.items())}
    visits = visits_of(call, model, {block: blocks[block] for block in firsts.values()}, inputs)
    found = {kind: last_layers_of(blocks[block], visits[block]) for kind, block in firsts.items()}
    return {block: found[kind] for block, kind in kinds.items()}


class Visit(NamedTuple):
    """How a block was called, and the names of its layers with weights in the order in which they were."""

    args: tuple[Any, ...]
    named: dict[str, Any]
    layers: list[str]


def visits_of(call: Call, model: nn.Module, blocks: Mapping[str, nn.Module], inputs: Any) -> dict[str, Visit]:
    """How the model calls these blocks."""
    found = dict[str, Visit]()

    def begin(block: str, layers: list[str], _: nn.Module, args: Any, named: Any) -> None:
        found[block] = Visit(args, named, layers)

    with ExitStack() as hooks:
        for name, block in blocks.items():
            layers = list[str]()
            handles = [block.register_forward_pre_hook(partial(begin, name, layers), with_kwargs=True)]
            for inner, module in block.named_modules():
                if isinstance(getattr(module, "weight", None), nn.Parameter):
                    handles.append(module.register_forward_hook(partial(note, layers, inner)))
            for handle in handles:
                hooks.callback(handle.remove)
        computed(call, model, {}, inputs)
    return found


def last_layers_of(block: nn.Module, visit: Visit) -> list[str]:
    """All layers, without those that needn't be zero, the first ones first."""
    last = list(dict.fromkeys(visit.layers))
    if not hands_on(block, visit, last):
        raise NotIdle(NOT_IDLE)
    for layer in list(last):
        fewer = [other for other in last if other != layer]
        if hands_on(block, visit, fewer):
            last = fewer
    return last


@torch.no_grad()
def hands_on(block: nn.Module, visit: Visit, zero: Sequence[str]) -> bool:
    """Whether a block returns what it is given if these layers are zero."""
    names = {f"{layer}.{tensor}" for layer in zero for tensor in TENSORS}
    zeros = {name: torch.zeros_like(weight) for name, weight in block.named_parameters() if name in names}
    given, *_ = (each for each in tree_leaves((visit.args, visit.named)) if isinstance(each, Tensor))
    returned, *_ = tree_leaves(functional_call(block, zeros, visit.args, visit.named))
    return is_close(returned, given)


def is_close(ours: Tensor, theirs: Tensor) -> bool:
    return ours.shape == theirs.shape and bool(((ours - theirs).abs().max() <= CLOSE * theirs.abs().max()).item())
