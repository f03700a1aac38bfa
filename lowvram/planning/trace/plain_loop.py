"""What a plain loop of torch holds for longer than lowvram's does:

    for inputs, targets in batches:
        outputs = model(inputs.to(device))
        loss = criterion(outputs, targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

Gradients live until just before the next backward pass. Inputs, outputs and loss live until the next ones take their
names. lowvram frees each as soon as nobody needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, final

from torch import Tensor

from lowvram.config.errors import require
from lowvram.config.settings import OURS, PLAIN
from lowvram.core.knob import Knob, Stage
from lowvram.core.rig import Part, Rig
from lowvram.core.row_shape import RowShape
from lowvram.core.stepper import Stepper, StepperAround, Update
from lowvram.knobs.stepping import AfterBackward


def as_plain_loop(rig: Rig, knobs: Mapping[str, Knob], row: RowShape) -> Rig:
    """The rig, whose steps hold what those of a plain loop do.

    Args:
        knobs: its knobs, by the names that messages use.
        row: how the model goes over ranks.

    Raises:
        BadInput: a plain loop can't train so.
    """
    check_is_plain(knobs, row)
    forward, criterion, named = rig.forward, rig.criterion, dict[str, Any]()

    def call(part: Part) -> Any:
        named["part"] = part
        named["outputs"] = forward(part)
        return named["outputs"]

    def compare(outputs: Any, part: Part) -> Tensor:
        named["loss"] = criterion(outputs, part)
        return named["loss"]

    def gradients() -> list[Tensor]:
        return [parameter.grad for parameter in rig.updated if parameter.grad is not None]

    return replace(rig, forward=call, criterion=compare, stepper=KeepingStepper(rig.stepper, gradients))


def check_is_plain(knobs: Mapping[str, Knob], row: RowShape) -> None:
    """Refuse steps that use gradients before the backward pass has ended, and those of a model cut into stages."""
    require(row.pipeline == 1, "plan.loop", PLAIN, f"{OURS} with a pipeline, whose steps no plain loop takes")
    for name, knob in knobs.items():
        is_early = knob.stage is Stage.STEPPING and not isinstance(knob, AfterBackward)
        require(not is_early, "plan.loop", PLAIN, f"{OURS} with {name}: a plain loop updates after the backward pass")


@final
class KeepingStepper(StepperAround):
    """Keeps gradients until the next backward pass.

    Args:
        gradients: those that an update is about to use.
    """

    def __init__(self, inner: Stepper, gradients: Callable[[], list[Tensor]]) -> None:
        super().__init__(inner)
        self.gradients, self.kept = gradients, list[Tensor]()

    def backward(self, loss: Tensor) -> None:
        self.kept.clear()
        self.inner.backward(loss)

    def update(self) -> Update:
        self.kept = self.gradients()
        return self.inner.update()
