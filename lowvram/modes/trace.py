"""A step on tensors without memory: what a point would hold, and how much it computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
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
    """The ledger of one step that nobody pays for; the step before it gave birth to the optimizer's state.

    On paper there is one rank: a sharded point's is what it would hold without its shards.
    """
    # A knob that a CPU can't play, such as tf32, changes no memory; compiled code would run eagerly.
    absent, unplayed = absent_facts(CPU).keys() | {Fact.MANY_RANKS}, (Stage.PROCESS, Stage.COMPILE)
    playable = {n: knob for n, knob in knobs.items() if knob.stage not in unplayed and not knob.needs() & absent}
    with paper():
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
    with paper(), plain, FlopCounterMode(display=False) as counter:
        step(assemble(problem, needed, CPU), example(problem.spec, 1))
    return counter.get_total_flops()


@contextmanager
def paper() -> Iterator[None]:
    """Tensors that are made inside have no memory."""
    with FakeTensorMode(allow_non_fake_inputs=True), EveryNumberIsOne():
        yield


class EveryNumberIsOne(TorchDispatchMode):
    """Whoever asks for the value of a number on paper, as Adafactor does, is told 1: sizes don't depend on it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1.0 if args[0].is_floating_point() else 1
        return func(*args, **(kwargs or {}))


def example(spec: DataSpec, num_samples: int) -> Part:
    """A part of the right shape."""
    shape = (num_samples, *spec.shape)
    if spec.modality is Modality.TOKENS:
        return Part(torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long))
    return Part(torch.zeros(shape), torch.zeros(num_samples, dtype=torch.long))
