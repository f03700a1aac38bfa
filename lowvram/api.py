"""lowvram as a library: knobs, plans and measurements for your own module and training loop.

    task = lowvram.task(model, inputs, criterion)
    rig = lowvram.assemble(task, ["precision=bf16", "ckpt=every2"])
    loss, update = lowvram.step(rig, lowvram.Part(inputs, targets))

`import lowvram` offers the public names, listed in lowvram/__init__.py; torch is imported when the first is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, final

import torch
import torch.nn.functional as F
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from lowvram.compat.torch_trees import tree_map_only
from lowvram.config.errors import BadInput, require
from lowvram.config.registry import knob_of, neutral_options, node_of, options_of
from lowvram.config.schema import build
from lowvram.config.settings import LOOPS, OURS, check_zero_grad, zero_grad_of
from lowvram.core import assemble as core
from lowvram.core.criterion import UserCriterion
from lowvram.core.device import choose_device
from lowvram.core.heaviest import fix_heaviest
from lowvram.core.knob import Knob
from lowvram.core.ledger import ledger
from lowvram.core.model_copies import copied
from lowvram.core.outputs import all_outputs, logits_of
from lowvram.core.probes.blocks import FoundBlocks, find_blocks
from lowvram.core.rig import IGNORE, Part, Rig, Task
from lowvram.core.step import step
from lowvram.core.structure import Blocks, Probe, Structure
from lowvram.core.values import Fill
from lowvram.loops.export.folder import load as load  # part of the API
from lowvram.loops.fields import percentiles
from lowvram.loops.profiling.clock import clock_for, synchronise
from lowvram.planning.devices import load_device
from lowvram.planning.estimate import PlanDevice, needs
from lowvram.planning.trace.tracer import trace

Criterion = Callable[[Any, Any], Tensor]  # outputs, targets -> the *sum* over the targets


def cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    """The sum of the cross-entropies in nats: outputs (..., classes), targets (...); targets of -100 are ignored."""
    logits = logits_of(outputs)
    logits = logits if logits.dtype is torch.float64 else logits.float()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="sum")


def refuse_to_fill(name: str, tensor: Tensor) -> None:
    """The `Fill` for a user's module, whose tensors must have their values already."""
    raise ValueError(f"{name} is on the meta device and has no values: fill the module first, after to_empty()")


@final
@dataclass(frozen=True)
class Samples:
    """Makes batches of any size with the shapes and formats of the user's inputs and targets, for plans."""

    inputs: Any
    targets: Any

    def example(self, num_samples: int) -> tuple[Any, Any]:
        def like(tensor: Tensor) -> Tensor:
            return torch.zeros(num_samples, *tensor.shape[1:], dtype=tensor.dtype)

        return tree_map_only(Tensor, like, (self.inputs, self.targets))


@final
@dataclass(frozen=True, eq=False, repr=False)
class ModuleTask(Task):
    """A task around the user's own module."""

    make: Callable[[], nn.Module]  # returns the module itself or, for a plan, a copy without memory
    inputs: Any  # a few samples: a tensor, or a dictionary of tensors, passed as keyword arguments
    loss: UserCriterion
    blocks_class: str | None = None
    spec: Samples | None = None  # for a plan only
    found: dict[Probe[Any], Any] = field(default_factory=dict, repr=False)  # what is known of the module

    def __repr__(self) -> str:
        return f"ModuleTask({type(self.make()).__name__}, criterion={self.loss.value})"

    def make_model(self) -> nn.Module:
        """The user's module, which they may have changed since it was last asked about: only its blocks stay known."""
        for probe in self.found.keys() - {Blocks()}:
            del self.found[probe]
        return self.make()

    def values(self, model: nn.Module, seed: int) -> Fill:
        return refuse_to_fill

    def call(self, model: nn.Module, inputs: Any) -> Any:
        return all_outputs(model, inputs)

    def criterion(self, outputs: Any, part: Part) -> Tensor:
        return self.loss(outputs, part.targets)

    def num_targets(self, part: Part) -> Tensor:
        return self.loss.num_targets(part)

    def in_parts(self, num_parts: int) -> None:
        self.loss.num_parts = num_parts

    def structure(self, model: nn.Module) -> Structure:
        return Structure(model, self.call, self.samples, self.samples, {Blocks(): self.find_blocks}, self.found)

    def find_blocks(self, known: Structure) -> FoundBlocks:
        """The blocks. No head: whether the criterion is a cross-entropy isn't known."""
        inputs = tree_map_only(Tensor, lambda tensor: tensor.cpu(), self.inputs)
        return find_blocks(known.model, self.call, inputs, self.blocks_class, asks_head=False)

    def samples(self, num_samples: int) -> Any:
        """The inputs, repeated or cut to so many samples, on the CPU."""
        rows = lambda tensor: tensor.cpu()[torch.arange(num_samples, device="cpu") % len(tensor)]  # noqa: E731
        return tree_map_only(Tensor, rows, self.inputs)

    def without_values(self, targets: Any) -> ModuleTask:
        """The same task over copies whose tensors have no memory."""
        model = self.make()
        self.structure(model).get(Blocks())  # before the tensors lose their values
        bare = lambda: copied(model, "meta", with_constants=False).train()  # noqa: E731
        return replace(self, make=bare, spec=Samples(self.inputs, targets))


def task(module: nn.Module, inputs: Any, criterion: Criterion = cross_entropy, blocks: str | None = None) -> ModuleTask:
    """Wrap a module of your own, on any device, for `assemble` and `plan`.

    Args:
        inputs: two samples or more: a tensor, or a dictionary of tensors, passed to the module as keyword arguments.
        criterion: maps outputs and targets to the *sum* of the losses over the targets (0-dim), or is one of torch's
            losses for outputs and targets, such as nn.CrossEntropyLoss(): their means are taken over the whole batch.
            If it has `count`, targets -> what the sum is divided by, that counts; else the targets that aren't -100.
        blocks: the class name of the repeated blocks; None: found by what modules save for the backward pass.

    Raises:
        BadInput: the module or the criterion is something else. The first `step` raises it if the criterion returns a
            mean.
    """
    require(isinstance(module, nn.Module), "module", type(module).__name__, "an nn.Module")
    allowed = "a function of outputs and targets, or one of torch's losses, such as nn.CrossEntropyLoss()"
    require(callable(criterion) and not isinstance(criterion, type), "criterion", criterion, allowed)
    name, count = getattr(criterion, "__name__", criterion), getattr(criterion, "count", None)
    loss = UserCriterion(criterion, "criterion", name, count)
    loss.models = lambda: (module,)
    return ModuleTask(lambda: module, inputs, loss, blocks)


def knob(*words: str) -> Knob:
    """A knob, written as on the command line: `knob("ckpt=every2")`, `knob("optimizer=sgd", "optimizer.lr=0.1")`.

    Raises:
        BadInput: there is no such group, option or field, or the value is out of range.
    """
    words = with_option(words)
    group, _, option = words[0].partition("=")
    if group not in neutral_options():
        raise BadInput(group, option, f"one of the groups {', '.join(neutral_options())}")
    if option not in options_of(group):
        raise BadInput(group, option, f"one of {', '.join(options_of(group))}")
    node = OmegaConf.merge(node_of(group, option), dict(field_of(word, group) for word in words[1:]))
    assert isinstance(node, DictConfig)
    return build(node, group)


def with_option(words: Sequence[str]) -> tuple[str, ...]:
    """The words for a knob; fields without an option are those of the neutral one, as on the command line."""
    group, dot, _ = words[0].partition("=")[0].partition(".")
    return (f"{group}={neutral_options()[group]}", *words) if dot and group in neutral_options() else tuple(words)


def field_of(word: str, group: str) -> tuple[str, Any]:
    """`"ckpt.every=3"` -> `("every", 3)`, by Hydra's grammar."""
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException as error:
        raise BadInput(
            word, word.partition("=")[2], f"written as on the command line ({str(error).splitlines()[0]})"
        ) from None
    return override.key_or_group.removeprefix(f"{group}."), override.value()


def words_in(text: str) -> list[str]:
    """The words of a text; spaces inside of brackets separate none: `"optimizer.args={betas: [0.9, 0.95]}"` is one."""
    words, depth = [""], 0
    for each in text:
        depth += (each in "{[(") - (each in ")]}")
        if each.isspace() and depth <= 0:
            words.append("")
        else:
            words[-1] += each
    return [word for word in words if word]


def by_group(words: str) -> list[str]:
    """`"ckpt=every2 ckpt.every=3 precision=bf16"` -> `["ckpt=every2 ckpt.every=3", "precision=bf16"]`"""
    groups: dict[str, list[str]] = {}
    for word in sorted(words_in(words), key=lambda word: "." in word.partition("=")[0]):
        groups.setdefault(word.partition("=")[0].partition(".")[0], []).append(word)
    return [" ".join(of_group) for of_group in groups.values()]


def all_knobs(chosen: str | Iterable[str | Knob]) -> dict[str, Knob]:
    """The chosen knobs by name, and the neutral option of every other group."""
    chosen = by_group(chosen) if isinstance(chosen, str) else chosen
    knobs = {group: (f"{group}={option}", knob_of((group, option))) for group, option in neutral_options().items()}
    for choice in chosen:
        value = knob(*words_in(choice)) if isinstance(choice, str) else choice
        group = value.group_name or type(value).__module__.removeprefix("lowvram.knobs.").partition(".")[0]
        knobs[group] = (
            with_option(words_in(choice))[0] if isinstance(choice, str) else f"{group}={type(value).__name__}",
            value,
        )
    return dict(knobs.values())


def assemble(
    task: Task, knobs: str | Iterable[str | Knob] = (), device: str | torch.device = "auto", seed: int = 0
) -> Rig:
    """The rig that trains a task; `rig.model` is the module itself, changed in place by checkpointing and compilation.

    Args:
        knobs: a string as on the command line ("ckpt=every2 optimizer=sgd optimizer.lr=0.1"), or a list with a string
            or a `Knob` object for each group.
        device: auto (CUDA, else CPU), cpu, cuda, cuda:N.

    Raises:
        BadInput: an unknown group, option or field, or a value out of range.
        Incompatible: the knobs conflict with each other, with the task or with this machine.
    """
    return core.assemble(task, all_knobs(knobs), choose_device(str(device)), seed)


def plan(
    task: ModuleTask,
    targets: Any,
    batch_size: int,
    knobs: str | Iterable[str | Knob] = (),
    device: str = "generic",
    loop: str = OURS,
    zero_grad: str | None = None,
) -> dict[str, Any]:
    """Predict the memory and time of a step on any device, also one that this machine lacks: the fields `plan.*` of a
    row (docs/planning.md).

    Args:
        task: made by `lowvram.task`, before `assemble` changes its module.
        targets: of two samples or more.
        batch_size: samples per update.
        device: a name from conf/data_sheets, such as rtx3060, cpu or generic, or the path of a YAML file like those.
        loop: "plain" for one that keeps gradients until the next backward pass, and inputs, outputs and loss until
            the next ones, as loops without lowvram do.
        zero_grad: where such a loop zeroes gradients: "before_backward" (None means that), "before_forward" or
            "after_step".

    Raises:
        BadInput, Incompatible: as `assemble`.
        CantPlan: the module's code depends on the values of tensors; the message says where.
    """
    require(loop in LOOPS, "loop", loop, f"one of {', '.join(LOOPS)}")
    check_zero_grad("zero_grad", zero_grad, loop)
    here = torch.device("cpu") if device == "cpu" else None
    plan_device = PlanDevice(device, load_device(device), here=here, zero_grad=zero_grad_of(loop, zero_grad))
    chosen = all_knobs(knobs)
    traced = trace(task.without_values(targets), chosen, batch_size, plan_device.target)  # pyright: ignore[reportArgumentType]
    return needs(traced, plan_device, any(knob.expandable_segments for knob in chosen.values()))


@final
@dataclass(frozen=True)
class Measured:
    """What `measure` returns."""

    peak_bytes: int  # on CUDA the allocator's, over the whole call; on a CPU the live bytes of tensors
    by_kind: dict[str, int]  # bytes at the peak of one step
    step_ms: list[float]  # per timed step
    losses: list[float]  # mean loss per step, of the warm-up too

    @property
    def step_ms_p50(self) -> float:
        return median(self.step_ms)

    @property
    def spread_ms(self) -> tuple[float, float]:
        """5th and 95th percentile."""
        p05, _, p95 = percentiles(self.step_ms)
        return p05, p95


def measure(rig: Rig, batches: Iterable[Part], warmup_steps: int = 3, steps: int = 10) -> Measured:
    """Train for some steps; return their memory, times and losses. Don't use the rig afterwards: the last step runs
    under the ledger, and after that compiled code would run eagerly (pytorch#190286).

    Args:
        batches: at least warmup_steps + steps + 1, on the CPU or the rig's device.
    """
    source, clock, losses = iter(batches), clock_for(rig.device), list[Tensor]()
    needed = warmup_steps + steps + 1

    def following() -> Part:
        if (batch := next(source, None)) is None:
            raise BadInput("batches", "too few", f"{needed}: warmup_steps + steps + 1")
        return batch.to(rig.device)

    for _ in range(warmup_steps):  # the first step makes the optimizer's state
        losses.append(step(rig, following())[0])
    for _ in range(steps):
        batch = following()
        with clock.lap("step"):
            losses.append(step(rig, batch)[0])
    synchronise(rig.device)
    step_ms, batch = clock.laps_ms("step"), following()
    allocated = torch.cuda.max_memory_allocated(rig.device) if rig.device.type == "cuda" else None
    fix_heaviest(rig, batch)
    with ledger(rig.model, rig.stepper, batch.tensors(), rig.device, teacher=rig.teacher) as peak:
        step(rig, batch)
    by_kind = {kind.value: num_bytes for kind, num_bytes in peak.by_kind.items()}
    peak_bytes = peak.peak_bytes if allocated is None else allocated
    return Measured(peak_bytes, by_kind, step_ms, [loss.item() for loss in losses])
