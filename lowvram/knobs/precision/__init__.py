"""precision: the number format in which the model computes."""

from lowvram.knobs.precision.autocast import (
    SMALLEST_SCALE,
    Bf16,
    Fp16,
    ScaledStepper,
    autocast,
)
from lowvram.knobs.precision.bf16_pure import Bf16Pure, Bf16Split
from lowvram.knobs.precision.fp8 import Fp8
from lowvram.knobs.precision.fp32 import Fp32, Tf32

__all__ = [
    "SMALLEST_SCALE",
    "Bf16",
    "Bf16Pure",
    "Bf16Split",
    "Fp8",
    "Fp16",
    "Fp32",
    "ScaledStepper",
    "Tf32",
    "autocast",
]
