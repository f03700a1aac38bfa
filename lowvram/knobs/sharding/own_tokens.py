"""Between the layers that are split, each rank of a row computes a run of each sample's tokens alone: norms, sums, what
stands after the blocks, and the loss (sequence parallelism).

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022). Where a row would add up
what its ranks have made, each gets the sum of its own tokens; where all read the same, each gets the tokens of all, in
the backward pass once more. The gradients of weights that are whole are sums over the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from torch import Tensor, nn

from lowvram.compat.torch_modules import own_parameters
from lowvram.compat.torch_trees import tree_flatten, tree_map_only, tree_unflatten
from lowvram.config.errors import require
from lowvram.core.derived import named_like
from lowvram.core.mesh import Ranks
from lowvram.core.probes.runs import positions_told
from lowvram.core.probes.splits import How, Splits
from lowvram.core.rig import Part, Rig
from lowvram.knobs.sharding.gradient_sum import GradientSum
from lowvram.knobs.sharding.row import is_in_row
from lowvram.knobs.sharding.runs import cut, num_tokens, with_tried_criterion
from lowvram.knobs.sharding.runs_row import InsideRow, RunsRow
from lowvram.knobs.sharding.split_layers import split

KEY = "sharding.sequence"


def split_with_own_tokens(model: nn.Module, splits: Splits, row: RunsRow, blocks: Sequence[str]) -> None:
    """As `split_layers.split`, of a model whose ranks have a run of tokens each.

    Args:
        blocks: their names, in order.
    """
    split(model, splits, row)
    inside, holders = InsideRow(row), dict[str, None]()
    for name, each in splits.layers.items():
        layer: Any = model.get_submodule(name)
        holder = name.rpartition(".")[0]
        if each.how is How.summed:
            for module in layer.modules():
                if own_parameters(module):
                    module.row = inside
        elif each.how is How.columns and holder not in blocks:
            layer.row = inside
            holders[holder] = None
    for name in holders:
        put_class(model.get_submodule(name), gathering_kind, inside)
    if row.way.takes_all:
        put_class(model.get_submodule(blocks[0]), cutting_kind, row)


def put_class(module: Any, kind_of: Any, row: RunsRow | InsideRow) -> None:
    module.__class__, module.tokens = kind_of(type(module)), row


def row_of(model: nn.Module) -> RunsRow | None:
    """Of a model whose ranks have a run of tokens each; None of any other one."""
    found = (vars(module).get("row") for module in model.modules())
    return next((each for each in found if isinstance(each, RunsRow)), None)


class OfTokens:
    """What the classes below add to a model's, with type hints that are read in this module (`stages.OfStages`)."""

    tokens: Any


@cache
def gathering_kind(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of modules like those of `kind` that hold split layers, which read all tokens. The module gets them
    before anything that a knob puts into its forward pass: some read their number from what they are given."""

    class Gathering(kind, OfTokens):
        def __call__(self, *given: Any, **named: Any) -> Any:
            if not self.tokens.row.num_tokens:
                return super().__call__(*given, **named)
            with self.tokens.giving():
                given, named = with_stream(given, named, self.tokens.give)
                return super().__call__(*given, **named)

    return named_like(Gathering, kind)


@cache
def cutting_kind(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of first blocks like those of `kind`, which take a rank's own tokens of what they are given."""

    class Cutting(kind, OfTokens):
        def __call__(self, *given: Any, **named: Any) -> Any:
            if self.tokens.num_tokens:
                # A copy: else the backward pass would keep all tokens.
                given, named = with_stream(given, named, lambda x: own_run(x, self.tokens))
            return super().__call__(*given, **named)

    return named_like(Cutting, kind)


def own_run(x: Tensor, row: RunsRow) -> Tensor:
    return x[..., row.own_of(row.num_tokens), :].contiguous()


def with_stream(given: tuple[Any, ...], named: dict[str, Any], change: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A module's arguments with another tensor in the place of the first one that holds floats of several features."""
    leaves, nesting = tree_flatten((given, named))
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 1:
            leaves[place] = change(leaf)
            return tree_unflatten(leaves, nesting)
    return given, named


def with_own_tokens(rig: Rig, row: RunsRow, ranks: Ranks) -> Rig:
    """The rig of a rank whose model has a run of the tokens of each of its samples.

    Args:
        row: the model's.
        ranks: the same.
    """

    def own(part: Part) -> Part:
        number = num_tokens(part, KEY)
        require(number >= row.size, "sharding.tensor", row.size, f"at most the {number} tokens of a sample")
        mine = row.own_of(number)
        if not row.way.takes_all:
            return cut(part, number, mine)
        targets = tree_map_only(Tensor, lambda each: each[:, mine].contiguous(), part.targets)
        return replace(part, targets=targets, num_tokens=number)

    def forward(part: Part) -> Any:
        number = part.num_tokens or 0
        told = row.way.told if number else None
        with row.computing(number), positions_told(rig.model, told, row.own_of(number), part.device):
            return rig.forward(part)

    def run(final: Rig, parts: list[Part], total: Tensor) -> Tensor:
        with row.in_step():
            loss = rig.run(final, parts, total)
        names = final.names_of_updated
        whole = {each: names[each] for each in final.updated if not is_in_row(each)}
        GradientSum(whole, ranks).finish()
        return loss

    return with_tried_criterion(replace(rig, own=own, forward=forward, run=run), KEY)
