"""Finds the widths inside the blocks of a model of transformers that its configuration can make smaller: features of
MLPs, and attention heads.

Names of layers don't tell, and neither do lists of families. So fields of the configuration are changed, one after
another, and the model is made without memory: a field counts if each tensor that it changes becomes smaller along one
dimension, inside a block, where one linear layer reads what the others write. Which place in a tensor belongs to which
unit shapes don't tell: that is proven on the trained model itself, which must compute in fp64 without some of the units
what it computes with zeros in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowvram.compat.torch_trees import tree_map_only
from lowvram.config.texts import first_line
from lowvram.models.hf_source import transformers
from lowvram.models.proof import Call, computed, fp64_copy, in_fp64, without_weights
from lowvram.models.widths import InnerWidth, Slices, mask, num_kept, sliced

Sizes = dict[str, Any]  # fields of a configuration, with other values
Shapes = Mapping[str, tuple[int, ...]]
# What transformers calls these in all configurations; `attribute_map` says under which name one of them has it.
HEADS, KV_HEADS, HEAD_SIZE = "num_attention_heads", "num_key_value_heads", "head_dim"
INPUTS = {nn.Linear: 1, transformers.Conv1D: 0}  # of weights of linear layers: the dimension of their inputs
NO_WIDTH = "no field of its configuration is their width and nothing else"
OF_EFFECT, OF_LOGITS = 1e-4, 1e-12  # how far two models' logits may differ: of what the units did, and of the logits


class Change(NamedTuple):
    """How one tensor's shape differs."""

    dim: int
    before: int
    after: int


class Found(NamedTuple):
    """A number of units inside the blocks that a configuration can make smaller.

    Attributes:
        what: the units.
        num_units: how many there are in each place.
        number: how many of them stay.
        sizes: the fields of the configuration, with the values that make it so.
        widths: where the units are; empty if all stay.
    """

    what: str
    num_units: int
    number: int
    sizes: Sizes
    widths: list[InnerWidth]

    @property
    def is_smaller(self) -> bool:
        return self.number < self.num_units

    def __str__(self) -> str:
        return f"{self.what} ({', '.join(self.sizes)})"


class Outcome(NamedTuple):
    """What may become smaller, and sentences about what stays as it is."""

    found: list[Found]
    left: list[str]

    @property
    def sizes(self) -> Sizes:
        return {name: size for each in self.found for name, size in each.sizes.items()}

    @property
    def widths(self) -> list[InnerWidth]:
        return [width for each in self.found for width in each.widths]

    @property
    def numbers(self) -> list[int]:
        """Of each width how many units stay."""
        return [each.number for each in self.found for _ in each.widths]


class Trials:
    """A model whose configuration is tried with other sizes.

    Args:
        model: the trained one.
        config: its configuration.
        shapes: of the model with other sizes, by the names of its tensors; None if there is no such model.
        blocks: the names of its blocks.
    """

    def __init__(
        self, model: nn.Module, config: Any, shapes: Callable[[Sizes], Shapes | None], blocks: Sequence[str]
    ) -> None:
        self.model, self.config, self.shapes, self.blocks = model, config, shapes, blocks
        self.values: dict[str, Any] = config.to_dict()
        self.before = shapes({}) or {}
        self.names = {name: config.attribute_map.get(name, name) for name in (HEADS, KV_HEADS, HEAD_SIZE)}

    def mlps(self, ratio: float, multiple: int) -> Outcome:
        """Every field that is a number of features inside the blocks."""
        unlike, found = self.unused_size(), list[Found]()
        for name in self.possible():
            changes = self.changes({name: unlike})
            # Twice as many are the two halves of a gated MLP in one layer.
            if not changes or any(change.after not in (unlike, 2 * unlike) for change in changes.values()):
                continue
            sizes = {change.before * unlike / change.after for change in changes.values()}
            if len(sizes) == 1:
                num_units = int(sizes.pop())
                parts = {each: Slices(each, *halves(change, num_units)) for each, change in changes.items()}
                if widths := grouped(self.model, parts):
                    number = num_kept(num_units, ratio, multiple)
                    found.append(Found("features inside blocks", num_units, number, {name: number}, widths))
        return Outcome(found, [] if found else [f"MLPs: {NO_WIDTH}"])

    def heads(self, ratio: float) -> Outcome:
        """Heads of keys and of values, each with the queries that it serves. Which numbers a configuration allows is
        tried, upwards from that of `ratio`."""
        what, num_heads, size = "attention heads", getattr(self.config, HEADS, None), self.names[HEAD_SIZE]
        if not isinstance(num_heads, int):
            return Outcome([], [])
        if size not in self.values:
            return Outcome([], [f"{what}: its configuration has no field for the size of one"])
        num_units = getattr(self.config, KV_HEADS, None) or num_heads
        width = getattr(self.config, HEAD_SIZE) or self.config.hidden_size // num_heads
        for number in range(num_kept(num_units, ratio), num_units):
            kv = {self.names[KV_HEADS]: number} if self.names[KV_HEADS] in self.values else {}
            sizes = {self.names[HEADS]: num_heads // num_units * number, **kv, size: width}
            changes = self.changes(sizes)
            if changes and all(each.before * number == each.after * num_units for each in changes.values()):
                parts = {name: Slices(name, *in_a_row(change, num_units)) for name, change in changes.items()}
                if widths := grouped(self.model, parts):
                    return Outcome([Found(what, num_units, number, sizes, widths)], [])
        return Outcome([Found(what, num_units, num_units, {self.names[HEADS]: num_heads}, [])], [])

    def possible(self) -> Iterator[str]:
        """Fields that may be a number of features: they have the size of some tensor, or nothing."""
        sizes = {size for shape in self.before.values() for size in shape}
        for name, value in self.values.items():
            is_size = type(value) is int and (value in sizes or 2 * value in sizes)
            if (value is None or is_size) and name not in self.names.values():
                yield name

    def unused_size(self) -> int:
        """A size that no tensor has, and neither has its double."""
        sizes = {size for shape in self.before.values() for size in shape}
        return next(size for size in count(8, 2) if not {size, 2 * size} & sizes)

    def changes(self, sizes: Sizes) -> dict[str, Change] | None:
        """How the tensors' shapes change; None if one is changed elsewhere than inside a block, along several
        dimensions, or isn't there any more."""
        after = self.shapes(sizes)
        if after is None or after.keys() != self.before.keys():
            return None
        changes = dict[str, Change]()
        for name, shape in self.before.items():
            if len(shape) != len(after[name]):
                return None
            differ = [Change(dim, *pair) for dim, pair in enumerate(zip(shape, after[name], strict=True))]
            differ = [change for change in differ if change.before != change.after]
            if len(differ) > 1 or (differ and not any(name.startswith(f"{block}.") for block in self.blocks)):
                return None
            if differ:
                (changes[name],) = differ
        return changes


def halves(change: Change, num_units: int) -> tuple[int, Tensor]:
    """The dimension and the places of features, of which each has one in each half, or one alone."""
    return change.dim, torch.arange(change.before).view(-1, num_units).T


def in_a_row(change: Change, num_units: int) -> tuple[int, Tensor]:
    """The dimension and the places of heads, which lie one after another."""
    return change.dim, torch.arange(change.before).view(num_units, -1)


def grouped(model: nn.Module, parts: Mapping[str, Slices]) -> list[InnerWidth]:
    """The widths to which tensors belong: each layer that reads units, with those that write them in the smallest
    module that has both. Empty if a tensor is left over, or a layer has none to read from.

    Args:
        parts: where units are in each tensor, by its name.
    """
    readers = [name for name, part in parts.items() if is_read(model, part)]
    writers = [name for name in parts if name not in readers]
    widths = list[InnerWidth]()
    for reader in sorted(readers, key=lambda name: -name.count(".")):  # those inside others first
        module, mine = reader, list[str]()
        while module and not mine:
            module = module.rpartition(".")[0]
            mine = [name for name in writers if name.startswith(f"{module}.")]
        if not mine:
            return []
        writers = [name for name in writers if name not in mine]
        widths.append(InnerWidth(tuple(parts[name] for name in mine), parts[reader]))
    return [] if writers else widths


def is_read(model: nn.Module, part: Slices) -> bool:
    """Whether units are along the inputs of a linear layer's weight."""
    layer, _, tensor = part.name.rpartition(".")
    module = model.get_submodule(layer)
    return tensor == "weight" and any(isinstance(module, kind) and part.dim == dim for kind, dim in INPUTS.items())


class Check:
    """Compares models without some units to the trained one with zeros in their place. On the CPU, which holds all
    weights in fp64, and once more what is left of those that become smaller.

    Args:
        make: the model with other sizes, on the CPU; its tensors hold any values.
        inputs: of a few samples, on the CPU.
    """

    def __init__(
        self,
        trained: nn.Module,
        make: Callable[[Sizes], nn.Module],
        call: Call,
        inputs: Callable[[], Any],
    ) -> None:
        self.trained, self.make, self.call, self.inputs = trained, make, call, inputs

    def holds(self, sizes: Sizes, widths: Sequence[InnerWidth], kept: Sequence[Tensor]) -> bool:
        """Whether both compute the same.

        Args:
            kept: of each width the units that stay.
        """
        small = without_weights(self.make(sizes))
        large, few = fp64_copy(self.trained), tree_map_only(Tensor, in_fp64, self.inputs())
        state = large.state_dict(keep_vars=True)  # in which tied tensors are one object
        whole = computed(self.call, large, {}, few)
        ours = computed(self.call, small, sliced(state, widths, kept), few)
        mask(state, widths, kept)
        return agree(ours, computed(self.call, large, {}, few), whole)

    def proven(self, candidates: Sequence[Found]) -> Outcome:
        """Those of the candidates for which it holds, all together."""
        found, left = list[Found](), list[str]()
        for candidate in candidates:
            together = Outcome([*found, candidate], [])
            try:
                holds = self.holds(together.sizes, together.widths, different_units(together.found))
            except Exception as error:  # layers don't compute in fp64, or code takes a size from elsewhere
                left.append(f"{candidate}: can't be checked in fp64 ({first_line(error)})")
                continue
            if holds:
                found = together.found
            else:
                left.append(f"{candidate}: without some, the model isn't the one with zeros in their place")
        return Outcome(found, left)

    def needed_bytes(self, candidates: Sequence[Found]) -> int:
        """The host memory that `proven` takes, without activations."""
        tensors = self.trained.state_dict()
        kept = sum(
            tensors[part.name].numel() * each.number // each.num_units
            for each in candidates
            for width in each.widths
            for part in width.slices()
        )
        return torch.float64.itemsize * (kept + sum(each.numel() for each in self.trained.parameters()))


def agree(ours: Tensor, theirs: Tensor, whole: Tensor) -> bool:
    """Whether two models compute the same logits, up to a small share of what zeros changed in those of the whole."""
    allowed = OF_EFFECT * (whole - theirs).abs().max() + OF_LOGITS * theirs.abs().max()
    return bool(((ours - theirs).abs().max() <= allowed).item())


def different_units(found: Sequence[Found]) -> list[Tensor]:
    """Of each width some units at random, but never the same ones as of the width before it."""
    numbers = [(each.num_units, each.number) for each in found for _ in each.widths]
    orders = {size: torch.randperm(size, generator=torch.Generator().manual_seed(0)) for size, _ in numbers}
    return [orders[size].roll(index)[:number] for index, (size, number) in enumerate(numbers)]
