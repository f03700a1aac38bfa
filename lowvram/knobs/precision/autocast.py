"""Mixed precision by autocast, with weights in fp32; and fp32 with and without TF32.

Micikevicius et al., "Mixed Precision Training" (2018); PyTorch, torch.amp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lowvram.config.errors import require
from lowvram.core.fact import Fact
from lowvram.core.kind import Kind
from lowvram.core.knob import Exactness, Knob, Stage
from lowvram.core.misfits import of_format
from lowvram.core.rig import Part, Rig
from lowvram.core.stepper import Stepper, StepperAround, Update

SMALLEST_SCALE = 2.0**-14  # of the loss: if gradients overflow even here, no scale can help
UNDER_AUTOCAST = "the model's own code and this device compute under torch.autocast: choose precision=fp32"


@dataclass(frozen=True)
class Bf16(Knob):
    """autocast to bfloat16: activations take about 60 %. It has the range of fp32, so it needs no loss scale."""

    stage = Stage.NUMERICS
    product_format = "bf16"
    exactness = Exactness.ROUNDING
    band = 2e-2
    saves = Kind.ACTIVATIONS
    misfits: ClassVar[Mapping[str, str]] = {f"{of_format('BFloat16')}|primitive descriptor": UNDER_AUTOCAST}
    needs_always = frozenset({Fact.BF16})
    breaks_always = frozenset({Fact.OWN_FORMAT})
    remedy = (Kind.ACTIVATIONS, 40)

    def improves_on(self, in_use: Knob) -> bool:
        """Not on fp8, whose other operators run under autocast to bf16 already."""
        return in_use.product_format in ("fp32", "tf32")

    def apply(self, rig: Rig) -> Rig:
        return autocast(rig, torch.bfloat16)


@dataclass(frozen=True)
class Fp16(Knob):
    """autocast to float16 with a loss scale, for cards without bf16."""

    init_scale: float = 65536.0
    growth_interval: int = 2000

    stage = Stage.NUMERICS
    product_format = "fp16"
    exactness = Exactness.ROUNDING
    band = 5e-3
    saves = Kind.ACTIVATIONS
    misfits: ClassVar[Mapping[str, str]] = {f"{of_format('Half')}|primitive descriptor": UNDER_AUTOCAST}
    breaks_always = frozenset({Fact.OWN_FORMAT})

    def __post_init__(self) -> None:
        allowed = f"between {SMALLEST_SCALE} and 2**31"
        require(SMALLEST_SCALE <= self.init_scale <= 2.0**31, "precision.init_scale", self.init_scale, allowed)
        require(self.growth_interval >= 1, "precision.growth_interval", self.growth_interval, "at least 1")

    def apply(self, rig: Rig) -> Rig:
        scaled = ScaledStepper(rig.stepper, self.init_scale, self.growth_interval)
        return replace(autocast(rig, torch.float16), stepper=scaled)


def autocast(rig: Rig, dtype: torch.dtype) -> Rig:
    """The rig with forward and criterion under autocast. Without a backward pass the cast weights aren't cached, as all
    of them would be kept to the end of the forward pass, and few are used twice."""

    def cast() -> torch.autocast:
        return torch.autocast(rig.device.type, dtype, cache_enabled=torch.is_grad_enabled())

    def forward(part: Part) -> Any:
        with cast():
            return rig.forward(part)

    def criterion(outputs: Any, part: Part) -> Tensor:
        with cast():
            return rig.criterion(outputs, part)

    return replace(rig, forward=forward, criterion=criterion)


class ScaledStepper(StepperAround):
    """A loss scale around any stepper: the loss is multiplied by `scale`, and the inner stepper divides gradients by
    it.

    An update that overflowed changes nothing; the scale halves. After `growth_interval` good updates it doubles.
    (torch's GradScaler can't be used with every stepper: it needs one optimizer with all gradients on the device.)
    """

    def __init__(self, inner: Stepper, scale: float, growth_interval: int) -> None:
        super().__init__(inner)
        self.scale, self.growth_interval = scale, growth_interval
        self.num_good = self.skipped_steps = 0

    def begin(self, num_parts: int, divisor: Tensor | float = 1.0) -> None:
        self.inner.begin(num_parts, torch.as_tensor(divisor * self.scale))

    def backward(self, loss: Tensor) -> None:
        self.inner.backward(loss * self.scale)

    def update(self) -> Update:
        update = self.inner.update()
        if update.applied:
            self.num_good += 1
            if self.num_good % self.growth_interval == 0:
                self.scale *= 2.0
            return update
        self.num_good, self.skipped_steps, self.scale = 0, self.skipped_steps + 1, self.scale / 2.0
        return update._replace(recoverable=self.scale >= SMALLEST_SCALE)

    def figures(self) -> Mapping[str, float]:
        mine = {"precision.skipped_steps": self.skipped_steps, "precision.scale": self.scale}
        return {**self.inner.figures(), **mine}

    def state_dict(self) -> dict[str, Any]:
        names = ("scale", "num_good", "skipped_steps")
        return {"inner": self.inner.state_dict(), **{name: getattr(self, name) for name in names}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self.scale, self.num_good, self.skipped_steps = (
            state["scale"],
            state["num_good"],
            state["skipped_steps"],
        )
