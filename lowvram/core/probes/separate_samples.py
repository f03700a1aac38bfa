"""Finds the blocks that compute each sample of a batch from that sample alone, as all do but those with BatchNorm.

Two forward passes on fake tensors, of two and of three samples, show which arguments of a block have a row for each
sample. Then each kind of block runs on two samples, one of them NaN, with all its weights zero: NaN spreads to every
output that depends on it, whatever the weights. It runs as in an evaluation, where nothing is dropped, and as in
training, where some compare samples. What NaN doesn't pass through, alone.py sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from lowvram.compat.torch_modes import without_dispatch_modes
from lowvram.compat.torch_modules import BatchNorm
from lowvram.compat.torch_trees import tree_unflatten
from lowvram.core.fact import ModelFact
from lowvram.core.generators import same_draws_afterwards
from lowvram.core.probes.alone import Call, is_same_alone, with_zeros
from lowvram.core.probes.calls import Use, is_per_sample, uses_of
from lowvram.core.structure import Probe, Structure, unless


@final
@dataclass(frozen=True)
class SeparateBlocks(Probe[dict[str, int]]):
    """The names of the blocks that compute each sample from that sample alone, told apart from what all samples share
    by `is_per_sample`, and how many values each returns: 0 for a tensor (samples, ...); else the length of a tuple that
    begins with such a tensor and else holds None. Empty if they aren't known."""

    def find(self, known: Structure) -> dict[str, int]:
        name_of = {module: name for name, module in known.model.named_modules()}
        names = [name_of[block] for block in known.blocks]
        batches = [known.short_example(num_samples) for num_samples in (2, 3)]
        try:
            of_two, of_three = (uses_of(known.model, known.call, inputs, names) for inputs in batches)
        except Exception:
            return {}
        verdicts: dict[str, bool] = {}  # blocks are alike: each kind is checked once
        found: dict[str, int] = {}
        for name in of_two.keys() & of_three.keys():
            module, use = known.model.get_submodule(name), of_two[name]
            kind = f"{type(module)} {module} {[getattr(leaf, 'shape', leaf) for leaf in use.leaves]}"
            if kind not in verdicts:
                verdicts[kind] = (
                    has_rows(use, of_three[name])
                    and keeps_samples_apart(module, use)
                    and is_same_alone(module, call_of(use))
                )
            if verdicts[kind]:
                found[name] = 0 if isinstance(use.output, Tensor) else len(use.output)
        return {name: found[name] for name in names if name in found}


SEPARATE_SAMPLES = ModelFact(
    "the blocks compute each sample from that sample alone",
    unless(
        lambda known: known.get(SeparateBlocks()),
        "not known of this model: leave tile=none, and choose ckpt and accum",
    ),
)


def has_rows(of_two: Use, of_three: Use) -> bool:
    """Whether each tensor has either a row for each sample, or is the same for all, needs no gradient, and can't be
    taken for one with rows; whether the first float among the arguments has rows, and so has the one tensor returned.
    """
    pairs = list(zip(of_two.leaves, of_three.leaves, strict=False))
    tensors = [pair for pair in pairs if any(isinstance(leaf, Tensor) for leaf in pair)]
    floats = [two for two, _ in tensors if isinstance(two, Tensor) and two.is_floating_point()]
    is_clear = len(of_two.leaves) == len(of_three.leaves) and all(has_rows_or_is_shared(*pair) for pair in tensors)
    first_output, *others = of_two.output if isinstance(of_two.output, tuple) else [of_two.output]
    is_plain = is_per_sample(first_output, 2) and all(other is None for other in others)
    return is_clear and is_plain and bool(floats) and is_per_sample(floats[0], 2)


def has_rows_or_is_shared(of_two: Any, of_three: Any) -> bool:
    if not (isinstance(of_two, Tensor) and isinstance(of_three, Tensor)):
        return False
    if is_per_sample(of_two, 2) and is_per_sample(of_three, 3):
        return True
    is_shared = of_two.shape == of_three.shape and (of_two.dim() < 2 or of_two.shape[0] == 1)
    return is_shared and not of_two.requires_grad


def call_of(use: Use) -> Call:
    return Call("forward", use.leaves, use.nesting, [is_per_sample(leaf, 2) for leaf in use.leaves], 0)


def keeps_samples_apart(block: nn.Module, use: Use) -> bool:
    """Whether neither of two samples changes what comes out for the other. A mask in a buffer may hide everything, or
    nothing, where it is zero: then no output is a number, and the block runs with buffers of ones."""
    if any(isinstance(module, BatchNorm) for module in block.modules()):
        return False
    with without_dispatch_modes(), same_draws_afterwards(block), torch.no_grad(), torch.device("cpu"):
        verdicts = {is_apart(block, buffers, use) for buffers in (0, 1)} - {None}
    return verdicts == {True}


def is_apart(block: nn.Module, buffers: int, use: Use) -> bool | None:
    """Whether it does so with buffers of this number; None if that can't be seen."""
    try:
        forward = with_zeros(block, buffers)
        if any(rows_with_nan(forward, use, None)):
            return None
        if not all(keeps_own(forward, use, sample) for sample in (0, 1)):
            return False
        return not any(spreads_from(forward.train(), use, sample) for sample in (0, 1))
    except Exception:
        return None


def keeps_own(block: nn.Module, use: Use, sample: int) -> bool:
    """Whether NaN in one of two samples makes outputs of that one NaN, and none of the other."""
    rows = rows_with_nan(block, use, sample)
    return rows[sample] and not rows[1 - sample]


def spreads_from(block: nn.Module, use: Use, sample: int) -> bool:
    """Whether NaN in one of two samples makes any output of the other NaN."""
    return rows_with_nan(block, use, sample)[1 - sample]


def rows_with_nan(block: nn.Module, use: Use, sample: int | None) -> list[bool]:
    """Which of two samples' outputs have a NaN, if one of the samples is NaN, or none."""
    leaves = [with_nan(leaf, sample) if isinstance(leaf, Tensor) else leaf for leaf in use.leaves]
    inputs, named = tree_unflatten(leaves, use.nesting)
    output = block(*inputs, **named)
    return (output if isinstance(output, Tensor) else output[0]).isnan().flatten(1).any(1).tolist()


def with_nan(like: Tensor, sample: int | None) -> Tensor:
    """Floats are zero, NaN in one sample; others are 1, which as a mask hides nothing."""
    if not like.is_floating_point():
        return torch.ones(like.shape, dtype=like.dtype)
    filled = torch.zeros(like.shape, dtype=like.dtype)
    if sample is not None and is_per_sample(like, 2):
        filled[sample] = torch.nan
    return filled
