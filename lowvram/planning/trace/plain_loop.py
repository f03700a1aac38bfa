"""What a plain loop of torch holds for longer than lowvram's does:

    for inputs, targets in batches:
        outputs = model(inputs.to(device))
        loss = criterion(outputs, targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

Gradients live until just before the next backward pass; in loops that call zero_grad elsewhere, until the next forward
pass, or the end of the update. Inputs, outputs and loss live until the next ones take their names. lowvram frees each
as soon as nobody needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, final

from torch import Tensor

from lowvram.config.errors import require
from lowvram.config.settings import AFTER_STEP, BEFORE_BACKWARD, OURS, PLAIN
from lowvram.core.fact import Fact
from lowvram.core.knob import Knob, Stage
from lowvram.core.rig import Part, Rig
from lowvram.core.row_shape import RowShape
from lowvram.core.stepper import Stepper, StepperAround, Update

EARLY = frozenset({Fact.GRADS_AT_UPDATE, Fact.PLAIN_BACKWARD})  # steppers that use gradients before end these


def as_plain_loop(rig: Rig, knobs: Mapping[str, Knob], row: RowShape, zero_grad: str) -> Rig:
    """The rig, whose steps hold what those of a plain loop do.

    Args:
        knobs: its knobs, by the names that messages use.
        row: how the model goes over ranks.
        zero_grad: one of `ZERO_GRADS`.

    Raises:
        BadInput: a plain loop can't train so.
    """
    check_is_plain(knobs, row)
    forward, criterion, named = rig.forward, rig.criterion, dict[str, Any]()
    kept, keeps_for_backward = list[Tensor](), zero_grad == BEFORE_BACKWARD

    def call(part: Part) -> Any:
        if not keeps_for_backward:
            kept.clear()
        named["part"] = part
        named["outputs"] = forward(part)
        return named["outputs"]

    def compare(outputs: Any, part: Part) -> Tensor:
        named["loss"] = criterion(outputs, part)
        return named["loss"]

    def keep() -> None:
        kept[:] = [parameter.grad for parameter in rig.updated if parameter.grad is not None]

    rig = replace(rig, forward=call, criterion=compare)
    return rig if zero_grad == AFTER_STEP else replace(rig, stepper=KeepingStepper(rig.stepper, kept, keep))


def check_is_plain(knobs: Mapping[str, Knob], row: RowShape) -> None:
    """Refuse steps that use gradients before the backward pass has ended, and those of a model cut into stages."""
    require(row.pipeline == 1, "plan.loop", PLAIN, f"{OURS} with a pipeline, whose steps no plain loop takes")
    for name, knob in knobs.items():
        is_early = knob.stage is Stage.STEPPING and not EARLY.isdisjoint(knob.breaks())
        require(not is_early, "plan.loop", PLAIN, f"{OURS} with {name}: a plain loop updates after the backward pass")


@final
class KeepingStepper(StepperAround):
    """Keeps gradients until the next backward pass, if nobody drops them before.

    Args:
        kept: the gradients.
        keep: fills it with those that an update is about to use.
    """

    def __init__(self, inner: Stepper, kept: list[Tensor], keep: Callable[[], None]) -> None:
        super().__init__(inner)
        self.kept, self.keep = kept, keep

    def backward(self, loss: Tensor) -> None:
        self.kept.clear()
        self.inner.backward(loss)

    def update(self) -> Update:
        self.keep()
        return self.inner.update()
