"""lowvram without its command line: knobs, plans and measurements for a loop and a module of your own.

    task = lowvram.task(model, inputs, criterion)
    rig = lowvram.assemble(task, ["precision=bf16", "ckpt=every2"])
    loss, update = lowvram.step(rig, lowvram.Part(inputs, targets))

`import lowvram` has all of these names; torch is imported when the first is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, final

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn

from lowvram.compat.torch_trees import tree_map_only
from lowvram.config.errors import BadInput
from lowvram.config.registry import knob_of, neutral_options, node_of, options_of
from lowvram.config.schema import build
from lowvram.core import assemble as core
from lowvram.core.device import choose_device
from lowvram.core.knob import Knob
from lowvram.core.ledger import ledger
from lowvram.core.rig import IGNORE, Part, Rig, Task
from lowvram.core.step import step
from lowvram.core.values import Fill
from lowvram.loops.export import load
from lowvram.loops.fields import percentiles
from lowvram.loops.profiling.clock import clock_for, synchronise
from lowvram.models.block_finder import FoundBlocks, find_blocks, without_memory
from lowvram.models.third_party import logits_of
from lowvram.planning.devices import load_device
from lowvram.planning.estimate import PlanDevice, needs
from lowvram.planning.trace.tracer import trace

__all__ = [
    "Knob",
    "Measured",
    "Part",
    "Rig",
    "Task",
    "assemble",
    "knob",
    "ledger",
    "load",
    "measure",
    "plan",
    "step",
    "task",
]

Criterion = Callable[[Any, Tensor], Tensor]  # outputs, targets -> the *sum* over the targets


def cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    """Summed over the targets, in nats; outputs (..., classes), targets (...), -100 counts for nothing."""
    logits = logits_of(outputs).float()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="sum")


def already_there(name: str, tensor: Tensor) -> None:
    """For a module that brings its values."""
    raise ValueError(f"{name} is on the meta device and has no values: fill the module first, after to_empty()")


@final
@dataclass(frozen=True)
class Samples:
    """The shapes of what a task was given, for as many samples as a plan asks for."""

    inputs: Any
    targets: Tensor

    def example(self, num_samples: int) -> tuple[Any, Tensor]:
        def like(tensor: Tensor) -> Tensor:
            return torch.zeros(num_samples, *tensor.shape[1:], dtype=tensor.dtype)

        return tree_map_only(Tensor, like, self.inputs), like(self.targets)


@final
@dataclass(frozen=True, eq=False)
class ModuleTask(Task):
    """A module that is there, and what training it means."""

    make: Callable[[], nn.Module]  # the module itself or, for a plan, a copy without memory
    inputs: Any  # a few samples: a tensor, or a dictionary of tensors that become keywords
    loss: Criterion = cross_entropy
    blocks_class: str | None = None
    spec: Samples | None = None  # of a plan
    found: list[FoundBlocks] = field(default_factory=list, repr=False)  # once it was looked for

    def make_model(self) -> nn.Module:
        return self.make()

    def values(self, model: nn.Module, seed: int) -> Fill:
        return already_there

    def call(self, model: nn.Module, inputs: Any) -> Any:
        return model(**inputs) if isinstance(inputs, dict) else model(inputs)

    def criterion(self, outputs: Any, part: Part) -> Tensor:
        return self.loss(outputs, part.targets)

    def find_blocks(self) -> FoundBlocks:
        if not self.found:
            inputs = tree_map_only(Tensor, lambda tensor: tensor.cpu(), self.inputs)
            call = lambda model, inputs: logits_of(self.call(model, inputs))  # noqa: E731
            self.found.append(find_blocks(self.make(), call, inputs, self.blocks_class))
        return self.found[0]

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return [model.get_submodule(name) for name in self.find_blocks().blocks]

    def has_plain_blocks(self, model: nn.Module) -> bool:
        return self.find_blocks().has_plain_blocks

    def without_values(self, targets: Tensor) -> ModuleTask:
        """The same task over copies whose tensors have no memory."""
        self.find_blocks()  # while tensors are still real
        return replace(self, make=partial(without_memory, self.make()), spec=Samples(self.inputs, targets))


def task(module: nn.Module, inputs: Any, criterion: Criterion = cross_entropy, blocks: str | None = None) -> ModuleTask:
    """What `assemble` and `plan` need to know of a module of your own, on any device.

    Args:
        inputs: two samples or more of what it is called with: a tensor, or a dictionary whose tensors become keywords.
        criterion: outputs and targets to the *sum* of the losses over the targets (0-dim).
        blocks: the class of the repeated blocks; None: found by what they keep for the backward pass.
    """
    return ModuleTask(lambda: module, inputs, criterion, blocks)


def knob(*words: str) -> Knob:
    """A knob in the words of the command line: `knob("ckpt=every2")`, `knob("optimizer=sgd", "optimizer.lr=0.1")`.

    Raises:
        BadInput: there is no such group, option or field, or the value is out of range.
    """
    group, _, option = words[0].partition("=")
    if group not in neutral_options():
        raise BadInput(group, option, f"one of the groups {', '.join(neutral_options())}")
    if option not in options_of(group):
        raise BadInput(group, option, f"one of {', '.join(options_of(group))}")
    node = node_of(group, option)
    for word in words[1:]:
        key, _, value = word.partition("=")
        node = DictConfig({**node, key.removeprefix(f"{group}."): value})
    return build(node, group)


def all_knobs(chosen: Iterable[str | Knob]) -> dict[str, Knob]:
    """The chosen ones by name, and the neutral one of every other group."""
    knobs = {group: (f"{group}={option}", knob_of((group, option))) for group, option in neutral_options().items()}
    for each in chosen:
        found = knob(*each.split()) if isinstance(each, str) else each
        group = type(found).__module__.removeprefix("lowvram.knobs.").partition(".")[0]
        knobs[group] = (each.split()[0] if isinstance(each, str) else f"{group}={type(found).__name__}", found)
    return dict(knobs.values())


def assemble(task: Task, knobs: Iterable[str | Knob] = (), device: str | torch.device = "auto", seed: int = 0) -> Rig:
    """The rig that trains a task; `rig.model` is the module itself, changed in place by checkpointing and compilation.

    Args:
        knobs: in the words of the command line ("ckpt=every2", "optimizer=sgd optimizer.lr=0.1") or as values.
        device: auto (CUDA, else CPU), cpu, cuda, cuda:N.

    Raises:
        BadInput, Incompatible: an unknown word, or knobs that can't be had together or here; one sentence.
    """
    return core.assemble(task, all_knobs(knobs), choose_device(str(device)), seed)


def plan(
    task: ModuleTask, targets: Tensor, batch_size: int, knobs: Iterable[str | Knob] = (), device: str = "generic"
) -> dict[str, Any]:
    """What a step would hold on a device that need not be here: the fields `plan.*` of a row, in bytes
    (docs/planning.md).

    Args:
        task: made by `lowvram.task`, its module not yet changed by `assemble`.
        targets: of two samples or more.
        batch_size: samples per update.
        device: a name of conf/devices, such as rtx3060, or the path of such a YAML; cpu; generic.

    Raises:
        BadInput, Incompatible: as `assemble`.
        CantPlan: the module looks at its numbers; the message says where.
    """
    place = PlanDevice(device, load_device(device), here=torch.device("cpu") if device == "cpu" else None)
    chosen = all_knobs(knobs)
    traced = trace(task.without_values(targets), chosen, batch_size, place.target)  # pyright: ignore[reportArgumentType]
    return needs(traced, place, any(knob.expandable_segments for knob in chosen.values()))


@final
@dataclass(frozen=True)
class Measured:
    """What some steps took."""

    peak_bytes: int  # on CUDA the allocator's, over the whole call; on a CPU the live bytes of tensors
    by_kind: dict[str, int]  # bytes at the peak of one step
    step_ms: list[float]  # of each timed step
    losses: list[float]  # of each step, the warm-up's too

    @property
    def step_ms_p50(self) -> float:
        return median(self.step_ms)

    @property
    def spread_ms(self) -> tuple[float, float]:
        """5th and 95th percentile."""
        p05, _, p95 = percentiles(self.step_ms)
        return p05, p95


def measure(rig: Rig, batches: Iterable[Part], warmup_steps: int = 3, steps: int = 10) -> Measured:
    """Train for some steps and tell what they took. The last thing to do with a rig: a step under the ledger comes at
    the end, after which compiled code would run eagerly (pytorch#190286).

    Args:
        batches: warmup_steps + steps + 1 of them at least, on the CPU or the rig's device.
    """
    source, clock, losses = iter(batches), clock_for(rig.device), list[Tensor]()
    for _ in range(warmup_steps):  # optimizer state is born here
        losses.append(step(rig, next(source).to(rig.device))[0])
    for _ in range(steps):
        batch = next(source).to(rig.device)
        with clock.lap("step"):
            losses.append(step(rig, batch)[0])
    synchronise(rig.device)
    step_ms, batch = clock.laps_ms("step"), next(source).to(rig.device)
    allocated = torch.cuda.max_memory_allocated(rig.device) if rig.device.type == "cuda" else None
    with ledger(rig.model, rig.stepper, batch.tensors(), rig.device) as peak:
        step(rig, batch)
    by_kind = {kind.value: num_bytes for kind, num_bytes in peak.by_kind.items()}
    losses_so_far = [loss.item() for loss in losses]
    return Measured(peak.peak_bytes if allocated is None else allocated, by_kind, step_ms, losses_so_far)
