"""Linear layers of which each rank of a row has a part.

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism" (2019). A layer
computes with this rank's part of its weights alone.

Shapes: ... samples and tokens, i features that a layer reads, o features that it makes, n ranks of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, final

import torch.nn.functional as F
from torch import Tensor, nn

from lowvram.compat.torch_modules import own_parameters
from lowvram.core.derived import named_like
from lowvram.core.layers import is_transposed
from lowvram.core.probes.splits import How, Split, Splits
from lowvram.core.shards import local, row_order, set_row_order
from lowvram.knobs.sharding.row import Row, packed_order


def split(model: nn.Module, splits: Splits, row: Row) -> None:
    """Make layers of a model such that this rank has a part of each. Names of layers and parameters stay."""
    for name, how in splits.layers.items():
        split_layer(model.get_submodule(name), how, row)
    for name, attribute in splits.counts:
        module = model.get_submodule(name)
        setattr(module, attribute, divided(getattr(module, attribute), row.size))


def divided(count: Any, num_ranks: int) -> Any:
    return tuple(each // num_ranks for each in count) if isinstance(count, tuple) else count // num_ranks


def split_layer(layer: Any, split: Split, row: Row) -> None:
    if split.how is How.summed:
        for module in layer.modules():
            if own_parameters(module):
                module.__class__, module.row = summed_kind(type(module)), row
        return
    dim, order = split_dim(layer, split.how), packed_order(split.packed, row.size)
    layer.weight = row.part(layer.weight, dim, order)
    if split.how is How.columns and layer.bias is not None:
        layer.bias = row.part(layer.bias, 0, order)
    layer.register_state_dict_post_hook(keep_order)
    layer.__class__ = KINDS[split.how, is_transposed(layer)]
    layer.row = row


class OfRow:
    """What the classes below add to a layer's."""

    row: Row


@cache
def summed_kind(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of layers like those of `kind`, the gradients of whose parameters are added up over a row. Not by hooks
    of the parameters: FSDP2 computes with other objects."""

    class Summed(kind, OfRow):
        def forward(self, *args: Any, **named: Any) -> Any:
            held = own_parameters(self)
            before = dict(held)
            held.update({name: self.row.read_by_all(each) for name, each in before.items() if each is not None})
            try:
                return super().forward(*args, **named)
            finally:
                held.update(before)

    return named_like(Summed, kind)


def split_dim(layer: nn.Module, how: How) -> int:
    """The dimension in which the weight of a linear layer is split."""
    return int((how is How.columns) == is_transposed(layer))


def keep_order(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any]) -> None:
    """After `state_dict`, which drops what is noted at tensors."""
    del metadata
    for name, parameter in module.named_parameters(recurse=False):
        if f"{prefix}{name}" in state:
            set_row_order(state[f"{prefix}{name}"], row_order(parameter))


class Columns(nn.Linear):
    """(..., i), the same on each rank, to (..., o / n): the features of this rank."""

    row: Row

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else local(self.bias)
        return self.row.product(input, self.matrix(), bias)

    def matrix(self) -> Tensor:
        return local(self.weight)


class Rows(nn.Linear):
    """(..., i / n), the features of this rank, to (..., o), the same on each rank."""

    row: Row

    def forward(self, input: Tensor) -> Tensor:
        made_o = self.row.summed(F.linear(input, self.matrix()))
        return made_o if self.bias is None else made_o + self.bias.to(made_o.dtype)

    def matrix(self) -> Tensor:
        return local(self.weight)


@final
class ColumnsTransposed(Columns):
    """The same with a weight (i, o / n)."""

    lowvram_reads_first = True

    def matrix(self) -> Tensor:
        return local(self.weight).t()


@final
class RowsTransposed(Rows):
    """The same with a weight (i / n, o)."""

    lowvram_reads_first = True

    def matrix(self) -> Tensor:
        return local(self.weight).t()


KINDS: dict[tuple[How, bool], type[nn.Module]] = {
    (How.columns, False): Columns,
    (How.columns, True): ColumnsTransposed,
    (How.rows, False): Rows,
    (How.rows, True): RowsTransposed,
}
