"""The tracer: runs the real `assemble`, and the real `step` twice, on fake tensors that act as another device's.

Two steps, because the first makes the optimizer's state. PyTorch's own MemTracker works alike; this tracer also covers
accumulation, offload, shards and the differences between a card and a CPU (cuda.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, groupby
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lowvram.compat.torch_autograd import current_node
from lowvram.config.errors import Incompatible
from lowvram.core import host
from lowvram.core.assemble import assemble
from lowvram.core.device import Card
from lowvram.core.fact import Fact, ModelFact
from lowvram.core.forms import Forms, forms_shared
from lowvram.core.fused import CompiledUpdate
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob, Neutral, Stage, conflicts
from lowvram.core.ledger import Ledger
from lowvram.core.phases import BETWEEN, Marks, with_phases
from lowvram.core.rig import Part, Rig
from lowvram.core.rounds import three_followed
from lowvram.core.slices import most_in_slice
from lowvram.core.step import step
from lowvram.planning.target import Target
from lowvram.planning.time.op_cost import NO_MODULE, OpCounter
from lowvram.planning.trace.allocations import Allocations, Kept, Result, names_result
from lowvram.planning.trace.computed import NUM_COLUMNS, Computed, pair_of, row_of
from lowvram.planning.trace.events import BACKWARD_OF, BATCH, KINDS, MADE_IN, PHASES, Phase, Trace
from lowvram.planning.trace.fake import example, fake_tensors
from lowvram.planning.trace.plain_loop import as_plain_loop
from lowvram.planning.trace.scratch import CUBLAS_OPS, scratch_of
from lowvram.planning.trace.streams import Streams
from lowvram.tasks import Problem

CPU = torch.device("cpu")


def trace(problem: Problem, knobs: Mapping[str, Knob], batch_size: int, target: Target) -> Trace:
    """Record the memory and work of rank 0 of a point, from its first weight on.

    A compiled point is traced as its eager equivalent, and may hold less or more. Copies to the host and back are
    assumed to keep up with the computation. Where other parameters train in other steps, it is the trace of those steps
    that take the most memory.

    Args:
        knobs: by the names that messages use.
        batch_size: of the logical batch, over all ranks.

    Raises:
        Incompatible: the knobs conflict, with each other or with the target.
        CantPlan: the model can't be traced; the message says which line of it.
    """
    if reasons := conflicts(knobs, target.absent()):  # `assemble` checks too, but after it has made the model
        raise Incompatible("; ".join(reasons))
    if target.row.pipeline == 1:
        return heaviest_trace(problem, knobs, batch_size, target)
    with forms_shared(forms_known(repr((problem.description, [*knobs.values()], replace(target, rank=0))))) as forms:
        for index, stage in enumerate(target.stages()):  # those before tell what they hand on
            if stage.rank < target.rank and not any(known == index + 1 for known, _ in forms):
                trace_of(0, problem, knobs, batch_size, stage)
        return heaviest_trace(problem, knobs, batch_size, target)


@lru_cache(64)
def forms_known(key: str) -> Forms:
    """The forms of what the stages of a pipeline hand on, of a point with this key."""
    del key
    return {}


def heaviest_trace(problem: Problem, knobs: Mapping[str, Knob], batch_size: int, target: Target) -> Trace:
    """The trace of those steps that take the most memory."""
    first, num_choices = trace_of(0, problem, knobs, batch_size, target)
    others = (trace_of(choice, problem, knobs, batch_size, target)[0] for choice in range(1, num_choices))
    return max(chain([first], others), key=lambda each: each.sums().peak_bytes) if num_choices > 1 else first


def trace_of(
    choice: int, problem: Problem, knobs: Mapping[str, Knob], batch_size: int, target: Target
) -> tuple[Trace, int]:
    """The trace with one choice of what trains, by its index in `Rig.heaviest`; and how many choices there are."""
    trace_recorder = TraceRecorder(target.card)
    fake = fake_tensors(target, trace_recorder.see, trace_recorder.streams)
    with trace_recorder.recording(), fake as known:
        rig = assemble(
            problem, {name: without_effect(knob) for name, knob in knobs.items()}, CPU, absent=target.absent()
        )
        trace_recorder.set_kinds(rig)
        for fix in rig.heaviest[choice : choice + 1]:
            fix()
        rig = rig if target.zero_grad is None else as_plain_loop(rig, knobs, target.row, target.zero_grad)

        def make_batch() -> Part:
            return problem.as_loaded(example(problem.spec, most_in_slice(batch_size, target.num_data_ranks), known))

        for _ in range(2):
            take_step(trace_recorder, with_phases(rig, trace_recorder), make_batch)
    return trace_recorder.trace(), len(rig.heaviest)


def take_step(trace_recorder: TraceRecorder, rig: Rig, make_batch: Callable[[], Part]) -> None:
    """Record one step on a new batch."""
    trace_recorder.begin_step()
    batch = make_batch()
    trace_recorder.set_batch(batch)
    step(rig, batch)
    trace_recorder.ledger.set_kind(rig.stepper.state_dict(), Kind.OPTIMIZER)


def without_effect(knob: Knob) -> Knob:
    """The knob itself; for one that acts only on a real process or in compiled code, only its declarations."""
    return knob if affects_trace(knob) else DeclarationsOnly(knob)


def affects_trace(knob: Knob) -> bool:
    """Whether a trace depends on what the knob does, and not only on its conflicts."""
    return knob.stage not in (Stage.PROCESS, Stage.COMPILE) and Fact.COMPILED not in knob.needs()


@final
@dataclass(frozen=True)
class DeclarationsOnly(Neutral):
    """The facts that a knob needs and breaks, without its effect."""

    knob: Knob

    stage = Stage.PROCESS

    def needs(self) -> frozenset[Fact | ModelFact]:
        return self.knob.needs()

    def breaks(self) -> frozenset[Fact | ModelFact]:
        return self.knob.breaks()


@final
class TraceRecorder(Marks):
    """Records a trace: births and deaths of storages in a ledger, what made each, phases, and the work of operators.

    Args:
        card: the card whose kernels' temporary memory is recorded; None: a CPU, whose kernels' isn't.
    """

    def __init__(self, card: Card | None) -> None:
        self.card, self.streams = card, Streams()
        self.streams_of: dict[int, int] = {}  # of storages that were asked for on another than the default one
        self.computed: list[tuple[int, ...]] = []
        self.first_matmuls: dict[
            bool, int
        ] = {}  # births of the first matrix product of the forward, of the backward pass
        self.ledger = Ledger(CPU.type, self.origin_of)
        self.op_counter = OpCounter()
        self.ledger.born = Kind.OTHER  # temporaries while weights get their initial values
        self.marks: list[tuple[int, Phase]] = [(0, Phase.BUILD)]  # the first event of each phase
        self.steps: list[int] = []  # the first event of each step
        self.modules: dict[nn.Module, str] = {}
        self.numbers: dict[str, int] = {}  # of the model's modules, by name
        self.running: list[str] = []  # modules in their forward pass, the innermost last

    @contextmanager
    def recording(self) -> Iterator[None]:
        hooks = [
            register_module_forward_pre_hook(self.module_begins),
            register_module_forward_hook(self.module_ends, always_call=True),
            register_optimizer_step_pre_hook(self.op_counter.begin_update),
            register_optimizer_step_post_hook(self.end_update),
        ]
        try:
            with self.ledger.recording(), three_followed(self.op_counter.stands_for):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def set_kinds(self, rig: Rig) -> None:
        """Set the kinds and names of the model's tensors, once it is assembled."""
        self.ledger.set_model_kinds(rig.model)
        self.ledger.born = Kind.ACTIVATIONS
        self.modules = {module: name for name, module in rig.model.named_modules()}
        self.numbers = {name: number for number, name in enumerate(self.modules.values())}
        self.name_weights(rig.model, "")
        if rig.teacher is not None:
            self.ledger.set_model_kinds(rig.teacher)
            self.name_weights(rig.teacher, "teacher.")

    def name_weights(self, model: nn.Module, prefix: str) -> None:
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            for serial in self.ledger.note(tensor, Kind.PARAMETERS):
                self.ledger.origins[serial] = f"{prefix}{name}"

    def set_batch(self, batch: Part) -> None:
        """Set the kind and the name of a logical batch: for a card it is in host memory, and the step moves it."""
        for tensor in batch.tensors():
            self.ledger.origins |= dict.fromkeys(self.ledger.note(tensor, Kind.INPUTS), BATCH)
            if self.card is not None:
                host.mark(tensor)
        self.ledger.set_kind(batch.tensors(), Kind.INPUTS)  # of what isn't host memory

    @property
    def is_steady(self) -> bool:
        """Whether it is the second step."""
        return len(self.steps) > 1

    def see(self, operator: Any, args: tuple[Any, ...], named: Mapping[str, Any], out: Any) -> None:
        num_before, born_before = len(self.ledger.lines), len(self.ledger.kinds)
        self.ledger.see(operator, args, out)
        if self.card is not None:
            self.note_scratch(self.card, operator, args, named, num_before)
        if number := self.streams.current.number:
            self.streams_of |= dict.fromkeys(range(born_before, len(self.ledger.kinds)), number)
        if self.is_steady:
            self.op_counter.module = self.numbers.get(self.running[-1], NO_MODULE) if self.running else NO_MODULE
            self.op_counter.note(operator, args, named, out)

    def note_scratch(
        self, card: Card, operator: Any, args: tuple[Any, ...], named: Mapping[str, Any], num_before: int
    ) -> None:
        """Record what the operator allocates beside its results while it runs, and whether it is the first one for
        which cuBLAS allocates a workspace.

        Args:
            num_before: lines of the ledger before the births of the results.
        """
        if host.is_computing():
            return
        if operator.overloadpacket in CUBLAS_OPS:
            self.first_matmuls.setdefault(current_node() is not None, len(self.ledger.lines) - 1)
        allocations, results = scratch_of(card, operator, args, named), list[tuple[int, int]]()
        if names_result(allocations):
            results = self.ledger.lines[num_before:]
            del self.ledger.lines[num_before:]
        self.add_scratch(card, allocations, f"{operator.overloadpacket.__name__} while it ran", results)
        self.ledger.lines += results

    def add_scratch(
        self, card: Card, allocations: Allocations, maker: str, results: list[tuple[int, int]]
    ) -> list[int]:
        """Record temporary storages; the lines of results are moved from `results` to their places. Returns the serial
        numbers of those that are still alive."""
        serials, kept = list[int](), list[int]()
        for item in allocations:
            if isinstance(item, Result):
                if results:
                    self.ledger.lines.append(results.pop(item.value))
            elif isinstance(item, Computed):
                self.computed.append(row_of(len(self.ledger.lines), item))
                serials += self.new_storages(pair_of(card, item), maker)
            elif isinstance(item, Kept):
                kept += self.new_storages(item, maker)
            elif isinstance(item, int):
                serials += self.new_storages([item], maker)
            else:
                serials += self.add_scratch(card, item, maker, results)
        self.ledger.lines += ((serial, 0) for serial in reversed(serials))
        return kept

    def new_storages(self, sizes: Sequence[int], maker: str) -> Sequence[int]:
        """Record births of temporary storages; returns their serial numbers."""
        serials = range(len(self.ledger.kinds), len(self.ledger.kinds) + len(sizes))
        self.ledger.kinds.update(dict.fromkeys(serials, Kind.OTHER))
        self.ledger.origins.update(dict.fromkeys(serials, maker))
        self.ledger.lines += zip(serials, sizes, strict=True)
        return serials

    def end_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if isinstance(optimizer, CompiledUpdate) and self.card is not None and not host.is_computing():
            for sizes in optimizer.scratch_bytes():
                self.add_scratch(self.card, sizes, f"{type(optimizer).__name__} while it ran", [])
        if self.is_steady:
            self.op_counter.end_update(optimizer)

    def begin_step(self) -> None:
        self.mark(BETWEEN)
        self.steps.append(len(self.ledger.lines))
        self.op_counter.begin()

    def mark(self, label: str) -> None:
        self.marks.append((len(self.ledger.lines), Phase(label)))
        if self.is_steady:
            self.op_counter.mark(Phase(label))

    def module_begins(self, module: nn.Module, *_: Any) -> None:
        self.running.append(self.modules.get(module, type(module).__name__))

    def module_ends(self, *_: Any) -> None:
        self.running.pop()

    def origin_of(self, tensor: Tensor, operator: Any) -> str:
        """What makes a tensor: an operator, and the module or the node of the backward pass that runs it."""
        maker = "" if operator is None else operator.overloadpacket.__name__
        if self.running:
            return f"{maker}{MADE_IN}{self.running[-1]}" if self.running[-1] else maker
        node = current_node()
        return maker if node is None else f"{maker}{BACKWARD_OF}{node.name().removesuffix('Backward0')}"

    def trace(self) -> Trace:
        lines = torch.tensor(deaths_in_order(self.ledger.lines), dtype=torch.int64).view(-1, 2)
        firsts = torch.tensor([first for first, _ in self.marks])
        phases = torch.tensor([PHASES.index(phase) for _, phase in self.marks])
        kinds = [KINDS.index(self.ledger.kinds[serial]) for serial in range(len(self.ledger.kinds))]
        return Trace(
            lines[:, 0].clone(),
            lines[:, 1].clone(),
            phases[torch.searchsorted(firsts, torch.arange(len(lines)), right=True) - 1],
            torch.tensor(kinds),
            [self.ledger.origins.get(serial, "") for serial in range(len(kinds))],
            torch.tensor([self.streams_of.get(serial, 0) for serial in range(len(kinds))], dtype=torch.int64),
            self.steps[1],
            sorted(self.first_matmuls.values()),
            torch.tensor(self.computed, dtype=torch.int64).view(-1, NUM_COLUMNS),
            list(self.numbers),
            self.op_counter.work(),
        )


def deaths_in_order(lines: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The lines (serial number, bytes), with consecutive deaths sorted by serial number: autocast frees its copies of
    weights in the order of addresses, which varies from run to run. Their order doesn't matter to an allocator."""
    ordered: list[tuple[int, int]] = []
    born: set[int] = set()

    def is_of_dead(line: tuple[int, int]) -> bool:
        serial, num_bytes = line
        was_born = serial in born
        born.add(serial)
        return was_born and num_bytes == 0  # a storage can be born without bytes

    for is_death, group in groupby(lines, key=is_of_dead):
        consecutive = list(group)
        ordered += sorted(consecutive) if is_death else consecutive
    return ordered
