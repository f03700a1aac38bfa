"""The tracer: the real `assemble` and the real `step`, twice, on tensors without memory, as another device plays them.

The second step is there because the optimizer's state is born in the first. PyTorch's own MemTracker has the same idea;
this one also knows accumulation, offload, shards and what a card does otherwise than a CPU (cuda.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lowvram.compat.torch_autograd import current_node
from lowvram.config.errors import Incompatible
from lowvram.core.assemble import assemble
from lowvram.core.knob import Fact, Kind, Knob, Stage, conflicts
from lowvram.core.ledger import Ledger
from lowvram.core.phases import BETWEEN, with_phases
from lowvram.core.rig import Rig
from lowvram.core.step import step
from lowvram.planning.target import Target
from lowvram.planning.time.op_cost import OpCounter
from lowvram.planning.trace.events import KINDS, PHASES, Phase, Trace
from lowvram.planning.trace.fake import example, fake_tensors
from lowvram.tasks import Problem

CPU = torch.device("cpu")


def trace(problem: Problem, knobs: Mapping[str, Knob], batch_size: int, target: Target) -> Trace:
    """What the first rank of a point asks of its device and its host, from the first weight on.

    What is compiled is traced as its eager equivalent (`is_equivalent` tells). Copies to the host and back are taken to
    keep up with the computation.

    Args:
        knobs: by the names that messages use.
        batch_size: of the logical batch, over all ranks.

    Raises:
        Incompatible: the knobs conflict, with each other or with the target.
        CantPlan: the model can't be traced; the message says which line of it.
    """
    if found := conflicts(knobs, target.absent()):  # `assemble` asks too, but after it has made the model
        raise Incompatible("; ".join(found))
    trace_recorder = TraceRecorder()
    with trace_recorder.at_work(), fake_tensors(target, trace_recorder.see):
        rig = assemble(
            problem, {name: without_values(knob) for name, knob in knobs.items()}, CPU, absent=target.absent()
        )
        trace_recorder.meet(rig)
        for _ in range(2):
            take_step(trace_recorder, with_phases(rig, trace_recorder), problem, batch_size // target.num_ranks)
    return trace_recorder.trace()


def is_equivalent(knobs: Mapping[str, Knob]) -> bool:
    """Whether a trace is that of an eager equivalent: the point itself is compiled, and may hold less or more."""
    return not any(Fact.COMPILED in knob.breaks() for knob in knobs.values())


def take_step(trace_recorder: TraceRecorder, rig: Rig, problem: Problem, num_samples: int) -> None:
    """One step on a batch of its own."""
    trace_recorder.begin_step()
    batch = example(problem.spec, num_samples)
    trace_recorder.book.own(batch.tensors(), Kind.INPUTS)
    step(rig, batch)
    trace_recorder.book.own(rig.stepper.state_dict(), Kind.OPTIMIZER)


def without_values(knob: Knob) -> Knob:
    """The knob itself, or what stands in for one that only acts on a real process or in compiled code."""
    return knob if is_played(knob) else Unplayed(knob)


def is_played(knob: Knob) -> bool:
    """Whether a trace depends on it, beside its conflicts."""
    return knob.stage not in (Stage.PROCESS, Stage.COMPILE) and Fact.COMPILED not in knob.needs()


@final
@dataclass(frozen=True)
class Unplayed(Knob):
    """What a knob says of itself, without what it does."""

    knob: Knob

    stage = Stage.PROCESS

    def needs(self) -> frozenset[Fact]:
        return self.knob.needs()

    def breaks(self) -> frozenset[Fact]:
        return self.knob.breaks()

    def apply(self, rig: Rig) -> Rig:
        return rig


@final
class TraceRecorder:
    """Keeps the book of a trace, and notes who makes what and when."""

    def __init__(self) -> None:
        self.book = Ledger(CPU.type, self.origin_of)
        self.op_counter = OpCounter()
        self.book.born = Kind.OTHER  # what is drawn to become a weight
        self.marks: list[tuple[int, Phase]] = [(0, Phase.BUILD)]  # the first event of each phase
        self.steps: list[int] = []  # the first event of each step
        self.modules: dict[nn.Module, str] = {}
        self.running: list[str] = []  # modules whose forward pass is under way, the innermost last

    @contextmanager
    def at_work(self) -> Iterator[None]:
        hooks = [
            register_module_forward_pre_hook(self.module_begins),
            register_module_forward_hook(self.module_ends, always_call=True),
            register_optimizer_step_pre_hook(self.op_counter.begin_update),
            register_optimizer_step_post_hook(self.end_update),
        ]
        try:
            with self.book.followed():
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def meet(self, rig: Rig) -> None:
        """The model is there: its tensors get their kinds and names."""
        self.book.own_model(rig.model)
        self.book.born = Kind.ACTIVATIONS
        self.modules = {module: name for name, module in rig.model.named_modules()}
        for name, tensor in [*rig.model.named_parameters(), *rig.model.named_buffers()]:
            for serial in self.book.note(tensor, Kind.PARAMETERS):
                self.book.origins[serial] = name

    @property
    def is_steady(self) -> bool:
        """Whether it is the second step."""
        return len(self.steps) > 1

    def see(self, operator: Any, args: tuple[Any, ...], named: Mapping[str, Any], out: Any) -> None:
        self.book.see(operator, args, out)
        if self.is_steady:
            self.op_counter.note(operator, args, named, out)

    def end_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.is_steady:
            self.op_counter.end_update(optimizer)

    def begin_step(self) -> None:
        self.mark(BETWEEN)
        self.steps.append(len(self.book.lines))
        self.op_counter.begin()

    def mark(self, label: str) -> None:
        self.marks.append((len(self.book.lines), Phase(label)))
        if self.is_steady:
            self.op_counter.mark(Phase(label))

    @contextmanager
    def lap(self, label: str) -> Iterator[None]:
        self.mark(label)
        yield
        self.mark(BETWEEN)

    def module_begins(self, module: nn.Module, *_: Any) -> None:
        self.running.append(self.modules.get(module, type(module).__name__))

    def module_ends(self, *_: Any) -> None:
        self.running.pop()

    def origin_of(self, tensor: Tensor, operator: Any) -> str:
        """Who makes a tensor: an operator, and the module or the node of the backward pass that runs it."""
        maker = "" if operator is None else operator.overloadpacket.__name__
        if self.running:
            return f"{maker} in {self.running[-1]}" if self.running[-1] else maker
        node = current_node()
        return maker if node is None else f"{maker} in the backward pass of {node.name().removesuffix('Backward0')}"

    def trace(self) -> Trace:
        lines = torch.tensor(deaths_in_order(self.book.lines), dtype=torch.int64).view(-1, 2)
        firsts = torch.tensor([first for first, _ in self.marks])
        phases = torch.tensor([PHASES.index(phase) for _, phase in self.marks])
        kinds = [KINDS.index(self.book.kinds[serial]) for serial in range(len(self.book.kinds))]
        return Trace(
            lines[:, 0].clone(),
            lines[:, 1].clone(),
            phases[torch.searchsorted(firsts, torch.arange(len(lines)), right=True) - 1],
            torch.tensor(kinds),
            [self.book.origins.get(serial, "") for serial in range(len(kinds))],
            self.steps[1],
            self.op_counter.work(),
        )


def deaths_in_order(lines: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Deaths that nothing lies between, in the order of births: autocast forgets its copies of weights in any order, as
    addresses have it, and no allocator minds."""
    ordered: list[tuple[int, int]] = []
    for is_death, group in groupby(lines, key=lambda line: line[1] == 0):
        side_by_side = list(group)
        ordered += sorted(side_by_side) if is_death else side_by_side
    return ordered
