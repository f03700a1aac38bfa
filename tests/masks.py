"""Rigs whose weights have masks, and what they hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lowvram.compress.sparsity import Magnitude, Movement, RigL, Set, TwoOfFour
from lowvram.compress.sparsity.masks import MaskingStepper
from lowvram.compress.sparsity.weights import Masked
from lowvram.core.assemble import assemble
from lowvram.core.knob import Knob
from lowvram.core.rig import Rig
from lowvram.core.step import step
from tests.laboratory import CPU, PROBLEMS, knobs_of, make_batch

STEPS = 6
OFTEN: dict[str, Masked] = {  # the masks change in most steps
    "magnitude": Magnitude(share=0.7, begin=0.0, end=0.7, every=1, steps=STEPS),
    "movement": Movement(share=0.7, begin=0.0, end=0.7, every=1, steps=STEPS),
    "set": Set(share=0.7, end=0.9, every=1, steps=STEPS),
    "rigl": RigL(share=0.7, end=0.9, every=2, steps=STEPS),
    "two_of_four": TwoOfFour(begin=0.3, steps=STEPS),
}
Choices = dict[str, str | Knob]


def rig_of(problem: str, **choices: str | Knob) -> Rig:
    return assemble(PROBLEMS[problem], knobs_of(**choices), CPU)


def masked_in(rig: Rig) -> dict[str, tuple[nn.Parameter, Tensor]]:
    """Weights with their masks, by the names of their layers."""
    stepper: Any = rig.stepper
    while not isinstance(stepper, MaskingStepper):
        stepper = stepper.inner
    return {mask.name: (weight, mask.masked) for weight, mask in stepper.masking.masks.items()}


def num_masked(rig: Rig) -> int:
    return sum(int(masked.sum()) for _, masked in masked_in(rig).values())


def steps_of(rig: Rig, num: int = STEPS, first: int = 0, num_samples: int = 8) -> Iterator[Rig]:
    """The rig after each of so many steps."""
    for number in range(first, first + num):
        step(rig, make_batch(rig.task.spec, num_samples, number))  # pyright: ignore[reportAttributeAccessIssue]
        yield rig


def trained(rig: Rig, num: int = STEPS) -> Rig:
    return list(steps_of(rig, num))[-1]


def total(rig: Rig) -> int:
    return sum(weight.numel() for weight, _ in masked_in(rig).values())


def optimizers_of(rig: Rig) -> Any:
    """Their states: of each parameter a dictionary."""
    inner: Any = rig.stepper
    return inner.inner.optimizer.state


def masks_of(rig: Rig) -> Tensor:
    return torch.cat([masked.flatten() for _, masked in masked_in(rig).values()])


def gradients_of(rig: Rig, batch: Any) -> dict[str, Tensor]:
    rig.criterion(rig.forward(batch), batch).backward()
    return {name: weight.grad for name, weight in rig.model.named_parameters() if weight.grad is not None}
