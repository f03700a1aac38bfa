"""A step on tensors without memory: what a point would hold, and how much it computes."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lowvram.core.device import absent_facts
from lowvram.core.knob import Fact, Knob, Stage
from lowvram.core.ledger import Peak, ledger
from lowvram.core.ranks import num_ranks
from lowvram.core.rig import Part, assemble
from lowvram.core.step import step
from lowvram.data.spec import DataSpec, Modality
from lowvram.tasks import Problem

CPU = torch.device("cpu")


def peak_on_paper(problem: Problem, knobs: dict[str, Knob], batch_size: int) -> Peak:
    """The ledger of one step that nobody pays for; the step before it gave birth to the optimizer's state."""
    # A knob that a CPU can't play, such as tf32, changes no memory. Ranks don't meet on paper: each would hold less.
    absent = absent_facts(CPU).keys() | {Fact.MANY_RANKS}
    unplayed = (Stage.PROCESS, Stage.COMPILE)  # compiled code would run eagerly: there is nothing of it on paper
    playable = {n: knob for n, knob in knobs.items() if knob.stage not in unplayed and not knob.needs() & absent}
    with FakeTensorMode(allow_non_fake_inputs=True):
        rig = assemble(problem, playable, CPU)
        batch = example(problem.spec, batch_size // num_ranks())
        step(rig, batch)
        with ledger(rig.model, rig.stepper, batch.tensors(), CPU) as peak:
            step(rig, batch)
    return peak


def model_flops(problem: Problem, knobs: dict[str, Knob]) -> int:
    """Floating-point operations of forward and backward for one sample, without any recomputation."""
    needed = {name: knob for name, knob in knobs.items() if knob.stage in (Stage.OPTIMIZER, Stage.STEPPING)}
    plain = sdpa_kernel(SDPBackend.MATH)  # the counter doesn't know the CPU's fused attention
    with FakeTensorMode(allow_non_fake_inputs=True), plain, FlopCounterMode(display=False) as counter:
        step(assemble(problem, needed, CPU), example(problem.spec, 1))
    return counter.get_total_flops()


def example(spec: DataSpec, num_samples: int) -> Part:
    """A part of the right shape."""
    shape = (num_samples, *spec.shape)
    if spec.modality is Modality.TOKENS:
        return Part(torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long))
    return Part(torch.zeros(shape), torch.zeros(num_samples, dtype=torch.long))
