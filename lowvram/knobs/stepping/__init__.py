"""stepping: when gradients are used and freed, and where updates are computed."""

from lowvram.knobs.stepping.after_backward import AfterBackward, AfterBackwardStepper
from lowvram.knobs.stepping.cpu_offload import CpuOffload, CpuOffloadStepper
from lowvram.knobs.stepping.in_backward import InBackward, InBackwardStepper, Norm, SumsIn
from lowvram.knobs.stepping.zeroth_order import ZerothOrder, ZerothOrderStepper

__all__ = [
    "AfterBackward",
    "AfterBackwardStepper",
    "CpuOffload",
    "CpuOffloadStepper",
    "InBackward",
    "InBackwardStepper",
    "Norm",
    "SumsIn",
    "ZerothOrder",
    "ZerothOrderStepper",
]
