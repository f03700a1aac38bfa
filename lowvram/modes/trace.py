"""A step on tensors without memory: what a point would hold, and how much it computes."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lowvram.core.knob import Knob, Stage
from lowvram.core.ranks import num_ranks
from lowvram.core.rig import assemble
from lowvram.core.step import step
from lowvram.plan.events import Sums
from lowvram.plan.paper import example, paper
from lowvram.plan.target import Target
from lowvram.plan.tracing import trace
from lowvram.tasks import Problem

CPU = torch.device("cpu")


def peak_on_paper(problem: Problem, knobs: dict[str, Knob], batch_size: int, target: Target | None = None) -> Sums:
    """The ledger of one step that nobody pays for; the step before it gave birth to the optimizer's state.

    Knobs that the target (None: a CPU) can't play are left out. With one rank that is sharding too: the sums are then
    what this process, one of the ranks that there are, would hold without its shards.
    """
    target = Target() if target is None else target
    playable = {name: knob for name, knob in knobs.items() if not knob.needs() & target.absent().keys()}
    return trace(problem, playable, batch_size // num_ranks(), target).sums(is_steady=True)


def model_flops(problem: Problem, knobs: dict[str, Knob]) -> int:
    """Floating-point operations of forward and backward for one sample, without any recomputation."""
    needed = {name: knob for name, knob in knobs.items() if knob.stage in (Stage.OPTIMIZER, Stage.STEPPING)}
    plain = sdpa_kernel(SDPBackend.MATH)  # the counter doesn't know the CPU's fused attention
    with paper(), plain, FlopCounterMode(display=False) as counter:
        step(assemble(problem, needed, CPU), example(problem.spec, 1))
    return counter.get_total_flops()
