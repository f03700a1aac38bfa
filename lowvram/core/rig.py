"""The rig: the assembled training machine, as an immutable value. What a knob may change, and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lowvram.compat.torch_fake import is_fake
from lowvram.compat.torch_trees import tree_leaves, tree_map_only
from lowvram.config.errors import Incompatible
from lowvram.core.rounding import Rounding
from lowvram.core.stepper import Stepper
from lowvram.core.structure import Structure
from lowvram.core.values import Fill

TOO_FEW = "Expected more than 1 value per channel"  # torch's words
IGNORE = -100  # targets with this value aren't counted, as in torch's losses


@final
@dataclass(frozen=True)
class Part:
    """Samples with their targets: a micro-batch, or a whole logical batch before it is split.

    `inputs` and `targets` are each a tensor, or tensors in dictionaries and tuples; the first dimension of every tensor
    counts samples. `soft` is what a teacher predicts for the targets: None without one; in a batch such tensors again,
    if they come with the samples; once the part is on the device, `SoftTargets`. `num_in_batch` is how many samples the
    logical batch has over all ranks, where ranks have slices of different sizes; None where they have equal ones.
    `num_tokens` is how many tokens a sample has, where this part has a run of them alone; None where it has all.
    """

    inputs: Any
    targets: Any
    soft: Any = None
    num_in_batch: int | None = None
    num_tokens: int | None = None

    @property
    def num_samples(self) -> int:
        return len(tree_leaves(self.targets)[0])

    @property
    def device(self) -> torch.device:
        return tree_leaves(self.targets)[0].device

    @property
    def num_targets(self) -> Tensor:
        """How many targets, in all tensors, aren't `IGNORE` (0-dim, int64, on their device, without waiting for it)."""
        first, *others = [(tensor != IGNORE).sum() for tensor in tree_leaves(self.targets)]
        return torch.stack([first, *others]).sum() if others else first

    def map(self, change: Callable[[Tensor], Tensor]) -> Part:
        """The part with `change` applied to each of its tensors."""
        inputs, targets, soft = (tree_map_only(Tensor, change, each) for each in (self.inputs, self.targets, self.soft))
        return Part(inputs, targets, soft, self.num_in_batch, self.num_tokens)

    def to(self, device: torch.device) -> Part:
        return self.map(lambda tensor: tensor.to(device))

    def pin_memory(self) -> Part:
        return self.map(Tensor.pin_memory)

    def tensors(self) -> list[Tensor]:
        """All that were loaded, and those alone: not what `SoftTargets` hold."""
        trees = (self.inputs, self.targets, self.soft)
        return [leaf for tree in trees for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class Task(ABC):
    """A problem: the model to be trained, and its criterion."""

    @abstractmethod
    def make_model(self) -> nn.Module:
        """The model. Called on the meta device: no memory yet."""

    @abstractmethod
    def values(self, model: nn.Module, seed: int) -> Fill:
        """A function that fills one parameter or buffer in place, given its dotted name. What it writes depends on the
        seed and the name alone."""

    def call(self, model: nn.Module, inputs: Any) -> Any:
        """Call `model` on a part's inputs; returns the outputs for the criterion."""
        return model(inputs)

    @abstractmethod
    def criterion(self, outputs: Any, part: Part) -> Tensor:
        """The *sum* of the losses of the part's targets (0-dim, at least fp32)."""

    def num_targets(self, part: Part) -> Tensor:
        """How many targets the criterion sums over (0-dim, on their device, without waiting for it)."""
        return part.num_targets

    def in_parts(self, num_parts: int) -> None:
        """Called before a batch is computed in several parts, whose losses are added."""
        del num_parts

    @abstractmethod
    def structure(self, model: nn.Module) -> Structure:
        """What is known of a model of this task, whatever knobs have put into it."""

    def with_teacher(self, rig: Rig) -> Rig:
        """The rig with a teacher, if the task has one; called once the weights have memory. May write `teacher`,
        `move`, which adds `Part.soft`, and `forward`."""
        return rig

    def with_added_loss(self, rig: Rig) -> Rig:
        """The rig with what the task adds to the criterion, whatever the logits; called after all knobs. May write
        `criterion`."""
        return rig

    def as_loaded(self, part: Part) -> Part:
        """An example of inputs and targets as a part from the loader, which may hold more."""
        return part


def one_after_another(rig: Rig, parts: list[Part], total: Tensor) -> Tensor:
    """Forward and backward of one part after the other; returns the mean loss (0-dim). The loss of each part is divided
    by the number of targets of the *whole* logical batch, so that parts with more targets weigh more. Each part is
    on the device only while it is computed.

    Args:
        total: the number of targets of the whole batch (0-dim).
    """
    losses = []
    for index, part in enumerate(parts):
        with rig.sync(index == len(parts) - 1), enough_samples(part, len(parts)):
            loss = loss_of(rig, part, total)
            rig.stepper.backward(loss)
        losses.append(loss.detach())
    return torch.stack(losses).sum()


@contextmanager
def enough_samples(part: Part, num_parts: int) -> Iterator[None]:
    """Around the computation of a part. Raises Incompatible if BatchNorm can't take its mean over one sample."""
    try:
        yield
    except (ValueError, RuntimeError) as error:  # torch.compile makes one of its own
        if part.num_samples > 1 or TOO_FEW not in str(error):
            raise
        # A plan follows three parts, whatever their number.
        number = "the" if any(map(is_fake, part.tensors())) else num_parts
        parts = f"in {number} parts (accum)" if num_parts > 1 else "of the batch"
        raise Incompatible(
            f"BatchNorm takes the mean over several samples, and {parts} there is one: choose fewer parts, or a larger"
            " train.batch_size"
        ) from None


def loss_of(rig: Rig, part: Part, total: Tensor) -> Tensor:
    """Move the part to the device, and compute its share of the mean loss (0-dim). Afterwards only autograd holds what
    was moved, as far as the backward pass needs it."""
    moved = rig.move(rig.own(part))
    loss = rig.criterion(rig.forward(moved), moved)
    return loss / total.to(loss.dtype)


Run = Callable[["Rig", list[Part], Tensor], Tensor]  # as `one_after_another`
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
RigChange = Callable[["Rig", int], "Rig"]  # rig, seed -> the changed rig


@final
@dataclass(frozen=True, repr=False)
class Rig:
    """Everything that a step uses. Knobs make the next one with `dataclasses.replace`."""

    task: Task
    device: torch.device
    model: nn.Module
    forward: Callable[[Part], Any]  # calls the model
    criterion: Callable[[Any, Part], Tensor]  # outputs, part -> the sum over the part's targets
    total: Callable[[list[Part]], Tensor]  # the number of targets in all parts, on the device
    make_optimizer: MakeOptimizer = None  # pyright: ignore[reportAssignmentType] # until OPTIMIZER
    stepper: Stepper = None  # pyright: ignore[reportAssignmentType] # until STEPPING
    rounding: Rounding | None = None  # how an fp32 result is kept in weights of fewer bits
    split: Callable[[Part], list[Part]] = lambda batch: [batch]  # the logical batch into parts, where the batch is
    own: Callable[[Part], Part] = lambda part: part  # what of a part this rank computes: perhaps some of its tokens
    move: Callable[[Part], Part] = lambda part: part  # to the device
    teacher: nn.Module | None = None  # a model that the task asks for advice, and that never trains
    shard: Callable[..., Any] = (
        fully_shard  # called as FSDP2's function is, with a module of the model, and then with the model
    )
    sync: Callable[[bool], AbstractContextManager[Any]] = lambda is_last: nullcontext()  # around each part
    run: Run = one_after_another  # forward and backward of all parts
    finish: Callable[[], None] = lambda: None  # called after the update of each step
    # What the stepper updates in place of the parameters that train, such as this rank's part of each.
    updated_of: Callable[[list[nn.Parameter]], list[nn.Parameter]] = lambda trainable: trainable
    # What an evaluation tells besides the task's scores: means over all targets, by name. Each function gives the sum
    # over the targets of one part (0-dim), right after its forward pass.
    eval_means: Mapping[str, Callable[[Part], Tensor]] = field(default_factory=dict)
    # Inside it the model has averages as its weights; None: there are none.
    averaged: Callable[[], AbstractContextManager[Any]] | None = None
    evaluating: Callable[[], AbstractContextManager[Any]] = nullcontext  # around evaluations
    # Called with the seed once there is a stepper: has the stepper change from step to step what trains or computes.
    over_time: RigChange = lambda rig, seed: rig
    # Where that changes, each of these fixes one of the choices with which a step may take the most memory.
    heaviest: Sequence[Callable[[], None]] = ()

    def __repr__(self) -> str:
        total, trained = (sum(map(Tensor.numel, each)) for each in (self.model.parameters(), self.trainable))
        share = "" if trained == total else f", {trained:,} of them trained"
        return f"Rig({type(self.model).__name__}, {total:,} parameters{share}, {self.device})"

    def then_over_time(self, change: RigChange) -> Rig:
        """The rig whose `over_time` makes one more change, after those that it already makes."""
        return replace(self, over_time=lambda rig, seed: change(self.over_time(rig, seed), seed))

    @property
    def structure(self) -> Structure:
        """What is known of the model."""
        return self.task.structure(self.model)

    @property
    def updated(self) -> list[nn.Parameter]:
        """What the stepper updates; not before the weights have memory."""
        return self.updated_of(self.trainable)

    @property
    def names_of_updated(self) -> dict[Tensor, str]:
        """The names of the parameters that train, by what the stepper updates for each."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        return {part: names[parameter] for part, parameter in zip(self.updated, self.trainable, strict=True)}

    @property
    def trainable(self) -> list[nn.Parameter]:
        """The parameters that train in the present step."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]


def is_finite(value: Tensor) -> bool:
    """Whether a 0-dim tensor is finite; waits for the device. A fake tensor counts as finite."""
    return is_fake(value) or bool(torch.isfinite(value))
