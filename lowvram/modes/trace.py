"""How much a model computes: a step on tensors without memory."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lowvram.core.knob import Knob, Stage
from lowvram.core.rig import assemble
from lowvram.core.step import step
from lowvram.planner.paper import example, paper
from lowvram.tasks import Problem

CPU = torch.device("cpu")


def model_flops(problem: Problem, knobs: dict[str, Knob]) -> int:
    """Floating-point operations of forward and backward for one sample, without any recomputation."""
    needed = {name: knob for name, knob in knobs.items() if knob.stage in (Stage.OPTIMIZER, Stage.STEPPING)}
    plain = sdpa_kernel(SDPBackend.MATH)  # the counter doesn't know the CPU's fused attention
    with paper(), plain, FlopCounterMode(display=False) as counter:
        step(assemble(problem, needed, CPU), example(problem.spec, 1))
    return counter.get_total_flops()
