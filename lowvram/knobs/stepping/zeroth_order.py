"""stepping=zeroth_order: no backward pass. The gradient is estimated from the losses of two forward passes.

Malladi et al., "Fine-Tuning Language Models with Just Forward Passes" (MeZO, 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from lowvram.config.errors import require
from lowvram.core.fact import Fact
from lowvram.core.kind import Kind
from lowvram.core.knob import Exactness, Knob, Stage
from lowvram.core.ledger import announce
from lowvram.core.probes.weights import REAL_WEIGHTS, SEPARATE_MEMORY
from lowvram.core.probes.writes import STEADY_WEIGHTS
from lowvram.core.repeat import Repeatable
from lowvram.core.rig import MakeOptimizer, Part, Rig, Run, is_finite
from lowvram.core.seeds import generator_for
from lowvram.core.stepper import Update
from lowvram.knobs.stepping.one_by_one import OneByOneStepper
from lowvram.knobs.stepping.scaling import check_clip, factor

PIECE_ELEMENTS = 2**22  # of a weight that are moved at a time: 16 MiB of random numbers


@dataclass(frozen=True)
class ZerothOrder(Knob):
    """The weights w move along a random direction z, to w + eps z and to w - eps z, and back. The difference of the two
    losses, divided by 2 eps, is the slope of the loss along z, the "projected gradient" g. The optimizer gets g z as
    the gradient, which is the gradient on average over z, with much noise.

    It doesn't break `GRADS_AT_UPDATE`: without a backward pass there is no gradient that an update could miss.
    """

    clip: float | None = None
    eps: float = 1e-3
    seed: int = 0

    stage = Stage.STEPPING
    exactness = Exactness.LOSSY
    band = 1e-2  # of g z, against the same z in fp64: two losses that are nearly equal are subtracted
    saves = Kind.ACTIVATIONS
    chosen_by_user = True
    decides_learning = True
    needs_always = frozenset(
        {
            Fact.SEPARATE_UPDATES,
            SEPARATE_MEMORY,
            REAL_WEIGHTS,
            Fact.WHOLE_UPDATES,
            Fact.DEVICE_WEIGHTS,  # directions are drawn where the weights are
            Fact.EVERY_PARAMETER,
            Fact.FP32_WEIGHTS,
            STEADY_WEIGHTS,
        }
    )
    breaks_always = frozenset({Fact.PLAIN_BACKWARD, Fact.UNDOABLE_STEPS})

    def __post_init__(self) -> None:
        check_clip(self.clip)
        require(0 < self.eps < math.inf, "stepping.eps", self.eps, "above 0")

    def caveat(self, model: nn.Module) -> str | None:
        return "each step's gradient is an estimate from two losses along one random direction (made for fine-tuning)"

    def clips_at(self) -> float | None:
        return self.clip

    def apply(self, rig: Rig) -> Rig:
        stepper = ZerothOrderStepper(rig.trainable, rig.make_optimizer, self)
        return replace(rig, stepper=stepper, run=partial(stepper.run, rig.run))


@final
class ZerothOrderStepper(OneByOneStepper):
    """One optimizer per parameter, so that only one gradient exists at a time.

    The direction is drawn again whenever it is used. It depends on the seed, the number of the step and the parameter's
    place, so it is the same on all ranks, and after a resumption.
    """

    def __init__(self, parameters: list[nn.Parameter], make_optimizer: MakeOptimizer, settings: ZerothOrder) -> None:
        super().__init__(parameters, make_optimizer)
        self.settings = settings
        self.num_steps = 0
        self.repeatable: Repeatable | None = None
        self.slope: Tensor | None = None  # of the loss along the direction, between `run` and `update`

    def begin(self, num_parts: int, divisor: Tensor | float = 1.0) -> None:
        """A loss scale, the `divisor`, plays no role: gradients are estimated from losses that aren't scaled."""
        self.num_steps += 1

    def backward(self, loss: Tensor) -> None:
        """There is no graph to walk through."""

    @torch.no_grad()
    def run(self, run: Run, rig: Rig, parts: list[Part], total: Tensor) -> Tensor:
        """Two forward passes of all parts by `run`, with the same random numbers; only what the first one changes in
        the model, such as running statistics, stays. Afterwards the weights are what they were, up to rounding.

        Returns:
            The mean of both mean losses (0-dim), which is that of the unmoved weights up to eps².
        """
        eps = self.settings.eps
        self.repeatable = self.repeatable or Repeatable(rig.model)
        first, again = self.repeatable.passes()
        self.move(eps)
        with first:
            plus = run(rig, parts, total)
        self.move(-2 * eps)
        with again:
            minus = run(rig, parts, total)
        self.move(eps)
        self.slope = (plus - minus) / (2 * eps)
        return (plus + minus) / 2

    def training(self) -> Iterator[tuple[int, nn.Parameter]]:
        """The parameters that train in this step, each with its place among all."""
        return ((place, parameter) for place, parameter in enumerate(self.optimizers) if parameter.requires_grad)

    def move(self, by: float) -> None:
        """Add the direction, times `by`, to the weights."""
        for place, parameter in self.training():
            self.along(place, parameter, lambda rows, direction: rows.add_(direction, alpha=by))

    def along(self, place: int, tensor: Tensor, use: Callable[[Tensor, Tensor], Any]) -> None:
        """Call `use` on the rows of a tensor that has a parameter's shape, some at a time, and on their piece of the
        direction: normally distributed, with variance 1."""
        rows = torch.atleast_1d(tensor.detach())
        generator = generator_for(self.settings.seed, f"{self.num_steps}:{place}", rows.device)
        num_rows = max(1, PIECE_ELEMENTS * len(rows) // max(1, rows.numel()))
        for piece in rows.split(num_rows):
            use(piece, announce(torch.randn(piece.shape, generator=generator, device=piece.device), Kind.OTHER))

    @torch.no_grad()
    def update(self) -> Update:
        slope, self.slope = self.slope, None
        assert slope is not None
        norm = slope.abs()
        applied = is_finite(norm)
        if applied:
            by = factor(norm, self.settings.clip, 1.0)
            slope = slope if by is None else slope * by
            for place, parameter in self.training():
                parameter.grad = announce(torch.empty_like(parameter), Kind.GRADIENTS)
                self.along(place, parameter.grad, lambda rows, direction: rows.copy_(direction).mul_(slope))
                self.optimizers[parameter].step()
                parameter.grad = None
        return Update(norm, applied)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.num_steps = state["num_steps"]
