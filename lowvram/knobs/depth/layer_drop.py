"""depth=layer_drop: in each step some blocks are skipped, for all samples.

Fan, Grave and Joulin, "Reducing Transformer Depth on Demand with Structured Dropout" (2020). There each block is
skipped with a probability, by itself, so that now and then none is. Here their number is fixed, so that every step
keeps the activations of so many blocks less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import Signature, signature
from itertools import product
from typing import Any, final

import torch
from torch import Tensor, nn

from lowvram.config.errors import require
from lowvram.core.fact import Fact, ModelFact
from lowvram.core.heaviest import extremes
from lowvram.core.kind import Kind
from lowvram.core.knob import Exactness, Knob, Stage
from lowvram.core.rig import Rig
from lowvram.core.seeds import generator_for
from lowvram.core.shards import local, spread_as
from lowvram.core.structure import BLOCKS, unless
from lowvram.knobs.depth.each_step import EachStep
from lowvram.knobs.depth.same_shape import LEAVE_DEPTH, SameShape, first_tensor

Fix = Callable[[], None]  # one of `Rig.heaviest`


SKIPPABLE = ModelFact(
    "the inputs of several blocks can stand in for their outputs",
    unless(lambda known: len(known.get(SameShape())) > 1, LEAVE_DEPTH),
)


@final
@dataclass(frozen=True)
class LayerDrop(Knob):
    """In each step `count` blocks, drawn anew, hand on what they are given, the same ones for all samples, parts and
    ranks. As in the paper what the others add isn't scaled, and evaluations skip none."""

    count: int = 1

    stage = Stage.BUILD
    exactness = Exactness.LOSSY
    band = 1e-5
    saves = Kind.ACTIVATIONS
    decides_learning = True
    needs_always = frozenset({BLOCKS, SKIPPABLE})
    breaks_always = frozenset({Fact.FIXED_BLOCKS, Fact.EVERY_BLOCK, Fact.UNDOABLE_STEPS})

    def __post_init__(self) -> None:
        require(self.count >= 1, "depth.count", self.count, "at least 1 (depth=none skips no block)")

    def caveat(self, model: nn.Module) -> str:
        blocks = "1 block is" if self.count == 1 else f"{self.count} blocks are"
        return f"{blocks} skipped in each step, drawn anew (none in evaluations)"

    def apply(self, rig: Rig) -> Rig:
        found = rig.structure.get(SameShape())
        allowed = f"less than {len(found)}, the number of this model's blocks that can be skipped"
        require(self.count < len(found), "depth.count", self.count, allowed)
        gates = [Gate(rig.model.get_submodule(name), num_outputs) for name, num_outputs in found.items()]
        for gate in gates:
            gate.block.forward = gate
        return rig.then_over_time(partial(self.with_draws, gates))

    def with_draws(self, gates: Sequence[Gate], rig: Rig, seed: int) -> Rig:
        """The rig whose stepper draws which blocks each step skips."""

        def skip(numbers: frozenset[int]) -> None:
            for number, gate in enumerate(gates):
                gate.is_skipped = number in numbers

        def draw(step: int) -> None:
            skip(self.drawn(step, len(gates), seed))

        def hold(numbers: frozenset[int]) -> None:
            stepper.prepare = lambda step: skip(numbers)

        stepper = EachStep(rig.stepper, draw)
        choices = [partial(hold, numbers) for numbers in least_saving(gates, self.count)]
        return replace(rig, stepper=stepper, heaviest=with_each(rig.heaviest, choices))

    def drawn(self, step: int, num_blocks: int, seed: int) -> frozenset[int]:
        """The blocks that a step skips, by their numbers among those that can be skipped."""
        generator = generator_for(seed, f"layer_drop {step}", torch.device("cpu"))
        return frozenset(torch.randperm(num_blocks, generator=generator)[: self.count].tolist())


@final
class Gate:
    """The forward pass of a block, which hands on what it is given while it is skipped. Its weights then get the
    gradients that the loss has for them, zeros, so that every optimizer, and every rank, sees the same weights in
    every step.

    Args:
        num_outputs: as `SameShape` counts them.
    """

    def __init__(self, block: nn.Module, num_outputs: int) -> None:
        self.block, self.call, self.num_outputs = block, block.forward, num_outputs
        self.is_skipped = False

    @property
    def __signature__(self) -> Signature:
        return signature(self.call)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if not (self.is_skipped and self.block.training):
            return self.call(*inputs, **named)
        x = first_tensor((inputs, named))
        for parameter in self.block.parameters():  # one after the other, so that a stepper may free each gradient
            if parameter.requires_grad:
                x = WithZeroGradient.apply(x, parameter)
        return (x, *[None] * (self.num_outputs - 1)) if self.num_outputs else x


@final
class WithZeroGradient(torch.autograd.Function):
    """Returns `x`; the gradient of `parameter` is zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor) -> Tensor:
        own = local(parameter)
        ctx.like = (own.shape, own.stride(), own.dtype, own.device)
        ctx.layout = None if own is parameter else parameter  # of a layer that is split over ranks
        return x.detach()  # no view, of which FSDP2 warns

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        shape, stride, dtype, device = ctx.like
        zeros = torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()
        return grad_x, zeros if ctx.layout is None else spread_as(ctx.layout, zeros)


def least_saving(gates: Sequence[Gate], count: int) -> list[frozenset[int]]:
    """Choices of `count` blocks, one of which saves the least: the last ones, if all are alike, since their gradients
    are made while the activations of the others are kept. Blocks that another knob has patched, to recompute their
    activations, save less than others, and of them the first: what the last ones recompute comes on top of the rest."""
    is_plain = [vars(gate.block)["forward"] is gate for gate in gates]
    sizes = [-sum(parameter.numel() for parameter in gate.block.parameters()) for gate in gates]
    are_alike = len(set(zip(is_plain, sizes, strict=True))) == 1
    last_first = list(reversed(range(len(gates))))
    orders = [last_first] if are_alike else [last_first, last_first[::-1]]
    ordered = [sorted(order, key=lambda number: is_plain[number]) for order in orders]
    return list(dict.fromkeys(choice for order in ordered for choice in extremes(order, count, sizes)))


def with_each(ones: Sequence[Fix], others: Sequence[Fix]) -> Sequence[Fix]:
    """Of two sets of choices, each choice of one with each of the other."""

    def both(one: Fix, other: Fix) -> None:
        one()
        other()

    return [partial(both, *pair) for pair in product(ones, others)] if ones else others
