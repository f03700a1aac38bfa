"""Whether blocks whose layers are split compute what they compute whole: by trial, in one process.

Copies of a block with random weights are the ranks of a row, each in a thread of its own: forward and backward pass,
against a copy that is whole. Weights take next to no memory, whatever their size (core/probes/alone.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from lowvram.compat.torch_modes import without_dispatch_modes
from lowvram.core.generators import same_draws_afterwards
from lowvram.core.probes.alone import Formats, Trial, are_close
from lowvram.core.probes.calls import Use, uses_of
from lowvram.core.probes.separate_samples import call_of
from lowvram.core.probes.splits import How, Splits
from lowvram.core.structure import Structure
from lowvram.knobs.sharding.in_threads import Meeting, on_threads
from lowvram.knobs.sharding.row import Row, packed_order
from lowvram.knobs.sharding.split_layers import split, split_dim


def trouble_with(known: Structure, splits: Splits, num_ranks: int) -> str | None:
    """The name of a block that computes something else, or nothing, if its layers are split so, or of a layer that is
    in no block; None if there is none."""
    names = {module: name for name, module in known.model.named_modules()}
    blocks = [names[block] for block in known.blocks]
    stray = next((name for name in splits.layers if not any(name.startswith(f"{block}.") for block in blocks)), None)
    if stray is not None:
        return stray
    uses = uses_of(known.model, known.call, known.short_example(2), blocks)
    verdicts = dict[str, bool]()  # blocks are alike: each kind is tried once
    for name in blocks:
        block, of_block = known.model.get_submodule(name), inside(splits, name)
        kind = f"{type(block)} {block} {[getattr(leaf, 'shape', leaf) for leaf in uses[name].leaves]} {of_block}"
        if kind not in verdicts:
            verdicts[kind] = is_same_split(block, uses[name], of_block, num_ranks)
        if not verdicts[kind]:
            return name
    return None


def inside(splits: Splits, block: str) -> Splits:
    """What is split of a block, by names inside it."""
    start = f"{block}."
    layers = {name.removeprefix(start): how for name, how in splits.layers.items() if name.startswith(start)}
    counts = ((name.removeprefix(start), each) for name, each in splits.counts if f"{name}.".startswith(start))
    return replace(splits, layers=layers, counts=tuple((name if name != block else "", each) for name, each in counts))


def is_same_split(block: nn.Module, use: Use, splits: Splits, num_ranks: int) -> bool:
    """Whether a block computes the same where its layers are split. False also where a trial fails. The block isn't
    changed."""
    with without_dispatch_modes(), same_draws_afterwards(block), torch.enable_grad(), torch.device("cpu"):
        for dtype in (torch.float64, torch.float32):  # some code computes in one format whatever its inputs are in
            for fill in (1, 0):  # a mask hides all where it is one of these
                try:
                    trial, formats = Trial(block, call_of(use), dtype, fill), Formats()
                    with formats:
                        whole = of_rank(trial, lambda copy: None)
                    if whole.output.isfinite().all():
                        return is_same(trial, whole, splits, num_ranks, formats.eps)
                except Exception:  # of code that we don't know
                    continue
    return False


@dataclass(frozen=True)
class Found:
    """What a copy has computed.

    Args:
        gradients: of its parameters, by their names.
    """

    output: Tensor
    of_inputs: list[Tensor]
    gradients: dict[str, Tensor]


def of_rank(trial: Trial, change: Callable[[nn.Module], None]) -> Found:
    """What a copy computes that was changed so."""
    copy = trial.copy(is_training=True)
    change(copy)
    result = trial.run(copy, trial.leaves)
    gradients = {name: each.grad for name, each in copy.named_parameters() if each.grad is not None}
    return Found(result.output, result.of_inputs, gradients)


def is_same(trial: Trial, whole: Found, splits: Splits, num_ranks: int, eps: float) -> bool:
    """Whether each rank computes what the whole block does, and the parts of gradients are together the whole ones."""
    ranks, parted = row_of(trial, splits, num_ranks), parts_in(trial.module, splits, num_ranks)
    outputs, pairs = [(found.output, whole.output) for found in ranks], list[tuple[Tensor, Tensor]]()
    for found in ranks:
        if found.gradients.keys() != whole.gradients.keys() or len(found.of_inputs) != len(whole.of_inputs):
            return False
        pairs += zip(found.of_inputs, whole.of_inputs, strict=True)
        pairs += [(each, whole.gradients[name]) for name, each in found.gradients.items() if name not in parted]
    for name, join in parted.items():
        if name in whole.gradients:
            pairs.append((join([found.gradients[name] for found in ranks]), whole.gradients[name]))
    # Gradients all at once: that of a bias of keys, for example, is nothing but rounding.
    return all(are_close([one for one, _ in each], [other for _, other in each], eps) for each in (outputs, pairs))


def row_of(trial: Trial, splits: Splits, num_ranks: int) -> list[Found]:
    """What each rank computes, all at the same time."""

    def run(meeting: Meeting, rank: int) -> Found:
        return of_rank(trial, lambda copy: split(copy, splits, ThreadRow(meeting, rank)))

    return on_threads(num_ranks, run)


def parts_in(block: nn.Module, splits: Splits, num_ranks: int) -> dict[str, Callable[[Sequence[Tensor]], Tensor]]:
    """The names of the parameters that are split, and how their ranks' parts are joined."""
    found = dict[str, Callable[[Sequence[Tensor]], Tensor]]()
    for name, each in splits.layers.items():
        if each.how is not How.summed:
            order = packed_order(each.packed, num_ranks)
            found[f"{name}.weight"] = partial(joined, split_dim(block.get_submodule(name), each.how), order)
            if each.how is How.columns:
                found[f"{name}.bias"] = partial(joined, 0, order)
    return found


def joined(dim: int, order: Tensor | None, parts: Sequence[Tensor]) -> Tensor:
    whole = torch.cat(list(parts), dim)
    return whole if order is None else whole.index_select(dim, order.argsort())


@final
class ThreadRow(Row):
    """A thread among those of a row."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._meeting.size

    def part(self, whole: nn.Parameter, dim: int, order: Tensor | None) -> nn.Parameter:
        values = whole.detach() if order is None else whole.detach().index_select(dim, order)
        return nn.Parameter(values.tensor_split(self.size, dim)[self._rank], whole.requires_grad)

    def read_by_all(self, x: Tensor) -> Tensor:
        return ReadByAll.apply(x, self)

    def summed(self, x: Tensor) -> Tensor:
        return Summed.apply(x, self)

    def sum(self, x: Tensor) -> Tensor:
        return self._meeting.sum(self._rank, x)

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        return torch.cat(self._meeting.of_all(self._rank, x.detach()), -2)

    def scatter(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        whole = self.sum(x)
        factor = whole.shape[-2] // sum(sizes)
        return whole.split([size * factor for size in sizes], -2)[self._rank].contiguous()


class ReadByAll(torch.autograd.Function):
    """See `Row.read_by_all`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, row: ThreadRow) -> Tensor:
        ctx.row = row
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return ctx.row.sum(gradients[0]), None


class Summed(torch.autograd.Function):
    """See `Row.summed`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, row: ThreadRow) -> Tensor:
        return row.sum(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return gradients[0], None
