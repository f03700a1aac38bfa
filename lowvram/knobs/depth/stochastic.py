"""depth=stochastic: each block leaves out what it adds for some samples, drawn anew in each step.

Huang et al., "Deep Networks with Stochastic Depth" (2016). There a whole batch skips a block, and evaluations scale
what blocks add; here each sample is drawn by itself, and what is added is scaled while training, as in timm's DropPath.

Shapes: l blocks, k branches of a block, n samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from inspect import Signature, signature
from typing import Any, final

import torch
from torch import Tensor, nn

from lowvram.config.errors import require
from lowvram.core.fact import Fact, ModelFact
from lowvram.core.knob import Exactness, Knob, Stage
from lowvram.core.probes import stated
from lowvram.core.probes.separate_samples import SEPARATE_SAMPLES
from lowvram.core.rig import Part, Rig, Run
from lowvram.core.seeds import generator_for
from lowvram.core.slices import begin_in_batch, num_in_batch
from lowvram.core.structure import BLOCKS, unless
from lowvram.knobs.depth.each_step import EachStep
from lowvram.knobs.depth.same_shape import LEAVE_DEPTH, SameShape, first_tensor

BRANCHES = ModelFact(
    "the task knows what blocks add to their inputs",
    unless(lambda known: known.get(stated.BRANCHES) or known.get(SameShape()), LEAVE_DEPTH),
)


@final
@dataclass(frozen=True)
class StochasticDepth(Knob):
    """Block l of L, counted from 0, leaves out what it adds for a share `rate * l / (L - 1)` of the samples, and scales
    it by the inverse of the other share for those that are left. Evaluations leave nothing out."""

    rate: float = 0.1

    stage = Stage.BUILD
    exactness = Exactness.LOSSY
    band = 1e-5
    decides_learning = True
    needs_always = frozenset({BLOCKS, BRANCHES})
    breaks_always = frozenset({Fact.FIXED_BLOCKS, SEPARATE_SAMPLES, Fact.UNDOABLE_STEPS})

    def __post_init__(self) -> None:
        require(0 <= self.rate < 1, "depth.rate", self.rate, "at least 0 and less than 1")

    def caveat(self, model: nn.Module) -> str:
        return f"blocks leave out what they add for some samples, the last block for {self.rate:.3g} of them"

    def apply(self, rig: Rig) -> Rig:
        return rig.then_over_time(partial(self.with_draws, branches_of(rig)))

    def with_draws(self, branches: list[list[Branch]], rig: Rig, seed: int) -> Rig:
        """The rig that draws for which samples of a part each branch counts."""
        draws = Draws(branches, self.rate, seed)
        return replace(
            rig,
            stepper=EachStep(rig.stepper, draws.begin_step),
            run=partial(draws.run, rig.run),
            forward=partial(draws.forward, rig.model, rig.forward),
        )


def branches_of(rig: Rig) -> list[list[Branch]]:
    """Of each block its branches, from now on patched. Of a model whose code isn't lowvram's the blocks themselves:
    what they add is how they change what they are given."""
    known = rig.structure
    if of_blocks := known.get(stated.BRANCHES):
        return [[Added(module) for module in known.modules(names)] for names in of_blocks]
    return [[Changed(block)] for block in known.modules(known.get(SameShape()))]


class Branch(ABC):
    """The forward pass of a module, which takes for each sample a factor for what the module adds.

    Attributes:
        factor_n: (samples of the part,); None: all are 1.
    """

    def __init__(self, module: nn.Module) -> None:
        self.call = module.forward
        self.factor_n: Tensor | None = None
        module.forward = self

    @property
    def __signature__(self) -> Signature:
        return signature(self.call)

    @abstractmethod
    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """What the module returns."""


@final
class Added(Branch):
    """A module whose output is added to what its block was given."""

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        output = self.call(*inputs, **named)
        return output if self.factor_n is None else output * beside(output, self.factor_n)


@final
class Changed(Branch):
    """A block, which adds the difference between what it returns and what it was given."""

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        output = self.call(*inputs, **named)
        if self.factor_n is None:
            return output
        x, y = first_tensor((inputs, named)), first_tensor(output)
        changed = torch.addcmul(x, y - x, beside(y, self.factor_n))
        return changed if isinstance(output, Tensor) else (changed, *output[1:])


def beside(tensor: Tensor, factor_n: Tensor) -> Tensor:
    """The factors in the tensor's dtype, one for each of its rows."""
    return factor_n.to(tensor.dtype).view(-1, *[1] * (tensor.dim() - 1))


@final
class Draws:
    """The factors of all branches in each step. They follow from the seed, the step, the branch and the sample's place
    in the whole batch, so that neither parts nor ranks make a difference."""

    def __init__(self, branches: list[list[Branch]], rate: float, seed: int) -> None:
        self.branches, self.rate, self.seed = branches, rate, seed
        self.step = self.num_samples = self.num_begun = 0  # samples of this rank in a step; those whose pass has begun
        self.num_before = self.num_in_batch = 0  # samples of the ranks before this one; of all ranks

    def begin_step(self, step: int) -> None:
        self.step = step

    def run(self, run: Run, rig: Rig, parts: list[Part], total: Tensor) -> Tensor:
        self.num_samples, self.num_begun = sum(part.num_samples for part in parts), 0
        self.num_before, self.num_in_batch = begin_in_batch(parts), num_in_batch(parts)
        return run(rig, parts, total)

    def forward(self, model: nn.Module, forward: Callable[[Part], Any], part: Part) -> Any:
        """The forward pass of a part. Recomputation in its backward pass finds the same factors."""
        if model.training:
            self.set_factors(self.factors(part.num_samples, part.device))
            return forward(part)
        self.set_factors(None)
        return forward(part)

    def factors(self, num_samples: int, device: torch.device) -> Tensor:
        """Of the next samples of this rank's slice: (l, k, n), fp32. Where a step passes several times over its parts,
        each pass draws the same."""
        begin = self.num_before + self.num_begun % self.num_samples
        self.num_begun += num_samples
        generator = generator_for(self.seed, f"stochastic depth {self.step}", device)
        shape = (len(self.branches), max(map(len, self.branches)), self.num_in_batch)
        drawn_lkn = torch.rand(shape, generator=generator, device=device)[..., begin : begin + num_samples]
        share_l11 = 1 - torch.linspace(0, self.rate, len(self.branches), device=device)[:, None, None]
        return (drawn_lkn < share_l11) / share_l11

    def set_factors(self, factors_lkn: Tensor | None) -> None:
        for number, of_block in enumerate(self.branches):
            for place, branch in enumerate(of_block):
                branch.factor_n = None if factors_lkn is None else factors_lkn[number, place]
