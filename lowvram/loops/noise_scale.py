"""The gradient noise scale: the batch size up to which more samples in a batch save steps.

McCandlish et al., "An Empirical Model of Large-Batch Training" (2018), appendix A: tr(S) / |G|**2, of the gradient G of
all samples and the covariance S of those of single samples. The gradient of a batch of B samples has |G|**2 + tr(S) / B
as the mean of its square, so two batches of unlike sizes tell both. Here they are the first part of a step and the
whole step. The gradient of the first part is there after its backward pass, so only numbers are kept.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from lowvram.config.settings import TrainSettings
from lowvram.core.fact import Fact
from lowvram.core.knob import Knob, Stage
from lowvram.core.mesh import data_ranks
from lowvram.core.rig import Part, Rig, Run
from lowvram.core.shards import square_sum
from lowvram.core.slices import num_in_batch
from lowvram.core.stepper import Stepper, StepperAround, Update

# Averages are over about the last fifth of the steps so far, as the noise scale rises while a run goes on, and over 100
# at most.
PART_OF_RUN, LEAST_WEIGHT = 5, 0.01
NAME = "noise_scale"
SINGLE = "it takes at least two parts in a step: choose accum=x2 or more"
HIDDEN = "the noise hides the gradient: train for more steps, or with a larger train.batch_size"
NO_NOISE = "no noise was seen: a part's gradient is that of the whole batch, so the noise scale is far below its size"


class Noise(ABC):
    """Whether the noise scale is measured, and what was found."""

    @abstractmethod
    def knobs(self) -> Mapping[str, Knob]:
        """The knobs that measure it, by the name that messages use."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Its present value for a row of metrics.jsonl; waits for the device."""

    @abstractmethod
    def fields(self) -> dict[str, Any]:
        """The row's fields; waits for the device."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What the averages of the next step depend on."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""


@final
class NotMeasured(Noise):
    def knobs(self) -> Mapping[str, Knob]:
        return {}

    def metrics(self) -> dict[str, float]:
        return {}

    def fields(self) -> dict[str, Any]:
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        del state


@final
class Measured(Noise):
    """Running averages of tr(S) and |G|**2, each by itself, since a ratio of averages is much less biased than the
    average of ratios. They stay on the device: no step waits for it."""

    def __init__(self) -> None:
        self.averages: Tensor | None = None  # (2,) fp64: tr(S), per sample, and |G|**2
        self.num_steps = 0  # that have had several parts

    def take_in(self, trace: Tensor, square: Tensor) -> None:
        """The estimates of one step (0-dim, fp64). Those that aren't finite don't count."""
        new = torch.stack([trace, square])
        old = torch.zeros_like(new) if self.averages is None else self.averages.to(new.device)
        weight = max(LEAST_WEIGHT, PART_OF_RUN / (PART_OF_RUN + self.num_steps))  # 1 in the first step
        self.averages = torch.where(new.isfinite().all(), old.lerp(new, weight), old)
        self.num_steps += 1

    def trace_and_square(self) -> tuple[float, float]:
        """tr(S), per sample, and |G|**2. Estimates may be negative."""
        return (0.0, 0.0) if self.averages is None else tuple(self.averages.tolist())

    def value(self) -> float | None:
        """In samples; None if it isn't known."""
        trace, square = self.trace_and_square()
        return trace / square if trace > 0 and square > 0 else None

    def reason(self) -> str:
        """Why it isn't known."""
        if self.averages is None:
            return SINGLE
        return HIDDEN if self.trace_and_square()[0] > 0 else NO_NOISE

    def knobs(self) -> Mapping[str, Knob]:
        return {"train.noise_scale=true": MeasureNoise(self)}

    def metrics(self) -> dict[str, float]:
        value = self.value()
        return {} if value is None else {NAME: value}

    def fields(self) -> dict[str, Any]:
        if (value := self.value()) is not None:
            return {"gradient": {NAME: value}}
        print(f"noise scale: unknown: {self.reason()}")
        return {"gradient": {f"{NAME}_reason": self.reason()}}

    def state(self) -> dict[str, Any]:
        return {"averages": self.averages, "num_steps": self.num_steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        if state:
            self.averages, self.num_steps = state["averages"], state["num_steps"]


def noise_of(train: TrainSettings) -> Noise:
    """What `train.noise_scale` asks for. Its knobs belong to no group: whoever puts a point's knobs together, to run,
    plan or choose them, adds these, so that all refuse the same."""
    return Measured() if train.noise_scale else NotMeasured()


@final
@dataclass(frozen=True)
class MeasureNoise(Knob):
    """Reads gradients after the first part of a step; changes nothing."""

    found: Measured = field(default_factory=Measured, repr=False)

    stage = Stage.STEPPING

    def needs(self) -> frozenset[Fact]:
        return frozenset({Fact.GRADS_AT_UPDATE, Fact.PLAIN_BACKWARD, Fact.WHOLE_UPDATES, Fact.WHOLE_SAMPLES})

    def apply(self, rig: Rig) -> Rig:
        stepper = NoiseStepper(rig.stepper, rig.model, self.found)
        return replace(rig, stepper=stepper, run=partial(stepper.run, rig.run))


@final
class NoiseStepper(StepperAround):
    """Measures the gradient after the first part, and hands the whole step's norm on with it."""

    def __init__(self, inner: Stepper, model: nn.Module, found: Measured) -> None:
        super().__init__(inner)
        self.model, self.found = model, found
        self.num_parts = self.num_done = 0
        self.divisor: Tensor | float = 1.0
        self.first: Tensor | None = None  # the square of the first part's gradient on this rank
        self.num_samples = math.nan  # of the step, over all ranks
        self.share = torch.tensor(math.nan)  # of the step's targets that are in the first part of this rank

    def begin(self, num_parts: int, divisor: Tensor | float = 1.0) -> None:
        self.num_parts, self.num_done, self.divisor, self.first = num_parts, 0, divisor, None
        self.inner.begin(num_parts, divisor)

    def run(self, run: Run, rig: Rig, parts: list[Part], total: Tensor) -> Tensor:
        if len(parts) > 1:
            self.num_samples = num_in_batch(parts)
            self.share = rig.task.num_targets(parts[0]).to(total.device) / total
        return run(rig, parts, total)

    def backward(self, loss: Tensor) -> None:
        self.inner.backward(loss)
        self.num_done += 1
        if self.num_done == 1 and self.num_parts > 1:
            gradients = [each.grad for each in self.model.parameters() if each.grad is not None]
            self.first = square_sum(gradients).double() / self.divisor**2

    def update(self) -> Update:
        update = self.inner.update()
        if self.first is not None and update.applied:
            self.found.take_in(*estimates(self.first, self.share.double(), update.grad_norm, self.num_samples))
        self.first = None
        return update


def estimates(first: Tensor, share: Tensor, norm: Tensor, num_samples: float) -> tuple[Tensor, Tensor]:
    """Unbiased estimates of tr(S), per sample, and |G|**2 from one step (0-dim, fp64).

    Several ranks have a first part each: their squares are averaged. A part counts for so many samples as its share of
    the targets is of the step's samples.

    Args:
        first: the square of the gradient of this rank's first part; its losses are divided by all targets of the step.
        share: of these targets that are in this part.
        norm: of the gradient of the whole step.
        num_samples: of the whole step.
    """
    per_rank = torch.stack([first / share.square(), 1 / (share * num_samples)])
    small, small_inverse = (data_ranks().sum(per_rank) / data_ranks().size).unbind()
    large, large_inverse = norm.double().square(), 1 / num_samples
    trace = (small - large) / (small_inverse - large_inverse)
    return trace, large - trace * large_inverse
