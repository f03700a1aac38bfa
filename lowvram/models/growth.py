"""A deeper model from a trained one: which blocks are copied, and where each tensor of the result comes from."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lowvram.config.transforms import GrowthKind

TENSORS = ("weight", "bias")  # of a layer


class Source(NamedTuple):
    """What a block of the deeper model is made from."""

    block: int  # the block of the trained model, counted from 0
    is_idle: bool  # whether its last layers are zero, so that it hands on what it is given


class Copied(NamedTuple):
    """Where a tensor of the deeper model comes from."""

    name: str  # of the trained model's tensor
    is_zero: bool  # whether it only has its shape


class Grown(NamedTuple):
    """How a model becomes deeper.

    Attributes:
        config: the configuration of the deeper model.
        tensors: of each tensor of that model, by its name, where it comes from.
        left: sentences: what stays as it is, and why.
    """

    config: Any
    tensors: dict[str, Copied]
    left: list[str]


def values_of(tensors: Mapping[str, Copied], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values of a deeper model's tensors, by their names. Those that aren't zero are the trained model's own; those
    that are take no memory."""
    values = {name: state[each.name] for name, each in tensors.items()}
    return {
        name: value.new_zeros(()).expand_as(value) if tensors[name].is_zero else value for name, value in values.items()
    }


def sources(runs: Sequence[range], num_blocks: int, factor: int, how: GrowthKind) -> list[Source]:
    """Of each block of the deeper model, in order.

    Args:
        runs: consecutive blocks of the trained model that may stand in any order; the others stay single.
        num_blocks: of the trained model.
        factor: how many times each block of a run is there.
    """
    starts, in_runs = {run.start: run for run in runs if run}, {block for run in runs for block in run}
    deeper = list[Source]()
    for block in range(num_blocks):
        if block in starts:
            deeper += copies(starts[block], factor, how)
        elif block not in in_runs:
            deeper.append(Source(block, is_idle=False))
    return deeper


def copies(run: range, factor: int, how: GrowthKind) -> list[Source]:
    """The blocks that come from one run."""
    if how is GrowthKind.stack:
        return [Source(block, is_idle=False) for _ in range(factor) for block in run]
    is_idle = how is GrowthKind.identity
    return [Source(block, is_idle and turn > 0) for block in run for turn in range(factor)]


def copied_tensors(
    names: Iterable[str], lists: Mapping[str, Sequence[Source]], last_layers: Mapping[str, Collection[str]]
) -> dict[str, Copied]:
    """Where each tensor of the deeper model comes from, by its name.

    Args:
        names: of the trained model's tensors.
        lists: of each list of blocks, by its name, what the blocks of the deeper model are made from.
        last_layers: of blocks, by their names, the layers that are zero where one is idle.
    """
    tensors = dict[str, Copied]()
    for name in names:
        inside = next((each for each in lists if name.startswith(f"{each}.")), None)
        if inside is None:
            tensors[name] = Copied(name, is_zero=False)
            continue
        number, _, inner = name.removeprefix(f"{inside}.").partition(".")
        layer, _, tensor = inner.rpartition(".")
        is_last = layer in last_layers.get(f"{inside}.{number}", ()) and tensor in TENSORS
        for place, source in enumerate(lists[inside]):
            if str(source.block) == number:
                tensors[f"{inside}.{place}.{inner}"] = Copied(name, source.is_idle and is_last)
    return tensors
