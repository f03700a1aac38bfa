"""A deeper model from a trained one: which blocks are copied, and the tensors of the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowvram.config.settings import GrowthKind

BLOCKS = "blocks"  # the list of blocks in each of lowvram's models
TENSORS = ("weight", "bias")  # of a layer


class Source(NamedTuple):
    """What a block of the deeper model is made from."""

    block: int  # the block of the trained model, counted from 0
    is_idle: bool  # whether its last layers are zero, so that it hands on what it is given


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


def grown(state: Mapping[str, Tensor], deeper: Sequence[Source], last_layers: Sequence[str]) -> dict[str, Tensor]:
    """The tensors of the deeper model, by name.

    Args:
        state: those of the trained model.
        last_layers: of a block the names of the layers that are zero where it is idle.
    """
    tensors = {name: tensor for name, tensor in state.items() if not name.startswith(f"{BLOCKS}.")}
    for number, source in enumerate(deeper):
        prefix = f"{BLOCKS}.{source.block}."
        for name, tensor in state.items():
            if name.startswith(prefix):
                inner = name.removeprefix(prefix)
                is_zero = source.is_idle and inner in [f"{layer}.{of}" for layer in last_layers for of in TENSORS]
                tensors[f"{BLOCKS}.{number}.{inner}"] = torch.zeros_like(tensor) if is_zero else tensor
    return tensors
