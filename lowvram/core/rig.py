"""The rig: the assembled training machine, as an immutable value. What a knob may change, and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from lowvram.compat.torch_fake import is_fake
from lowvram.compat.torch_modules import Dropout
from lowvram.compat.torch_trees import tree_leaves, tree_map
from lowvram.core.values import Fill

IGNORE = -100  # a target with this value counts for nothing


@final
@dataclass(frozen=True)
class Part:
    """Samples with their targets: a micro-batch, or a whole logical batch that is not split yet.

    `inputs` is a tensor or a dictionary of tensors; the first dimension of every tensor counts samples.
    """

    inputs: Any
    targets: Tensor

    @property
    def num_samples(self) -> int:
        return len(self.targets)

    @property
    def num_targets(self) -> Tensor:
        """How many targets count (0-dim, int64, on the targets' device: asking waits for nothing)."""
        return (self.targets != IGNORE).sum()

    def map(self, change: Callable[[Tensor], Tensor]) -> Part:
        """The part with `change` applied to each of its tensors."""
        return Part(tree_map(change, self.inputs), change(self.targets))

    def to(self, device: torch.device, non_blocking: bool = False) -> Part:
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Part:
        return self.map(Tensor.pin_memory)

    def tensors(self) -> list[Tensor]:
        return [*tree_leaves(self.inputs), self.targets]


class Update(NamedTuple):
    """What became of one update."""

    grad_norm: Tensor  # global, before clipping; 0-dim
    applied: bool  # False: a gradient was not finite, and (unless the stepper says otherwise) nothing was changed
    recoverable: bool = False  # not applied because a loss scale was too large; the next step tries a smaller one


class Stepper(ABC):
    """Owns the backward passes and the update of one step."""

    @abstractmethod
    def begin(self, num_parts: int, divisor: Tensor | float = 1.0) -> None:
        """A step of `num_parts` backward calls starts; gradients will arrive `divisor` times too large.

        A `divisor` that is a tensor (0-dim), whatever its value, is a loss scale: a step whose gradients are not finite
        must change nothing. With the plain 1.0 such a step is the run's last one.
        """

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """The backward pass of one part."""

    @abstractmethod
    def update(self) -> Update:
        """Use the gradients of the step and free them."""

    @abstractmethod
    def set_lr(self, lr: float) -> None:
        """The learning rate of the updates to come."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on, as tensors and plain values."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""


class Task(ABC):
    """A problem: the model that is to be trained, and what training it means."""

    @abstractmethod
    def make_model(self) -> nn.Module:
        """The model. Called on the meta device: no memory yet."""

    @abstractmethod
    def values(self, model: nn.Module, seed: int) -> Fill:
        """What fills the parameters and buffers of the model in place, one after another, each told by its dotted name:
        a function of the seed and the name alone."""

    def call(self, model: nn.Module, inputs: Any) -> Any:
        """What `model` makes of a part's inputs, as the criterion takes it."""
        return model(inputs)

    @abstractmethod
    def criterion(self, outputs: Any, part: Part) -> Tensor:
        """The *sum* of the losses of the part's targets (0-dim, at least fp32)."""

    def num_targets(self, part: Part) -> Tensor:
        """How many targets the criterion sums over (0-dim, on their device: asking waits for nothing)."""
        return part.num_targets

    @abstractmethod
    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The repeated units of the model, in the order of the forward pass; none where nobody knows them."""

    def head(self, model: nn.Module) -> nn.Linear | None:
        """The layer that makes the logits, if the criterion is their cross-entropy summed over the targets; None where
        there is no such layer, or the task doesn't know it."""
        del model
        return None

    def has_plain_blocks(self, model: nn.Module) -> bool:
        """Whether blocks are called with tensors alone, by place, and return one."""
        del model
        return True

    def has_few_shapes(self) -> bool:
        """Whether the batches have one shape, or one of a few, but for the number of their samples."""
        return True

    def is_random(self, model: nn.Module) -> bool:
        """Whether the model draws random numbers while it trains."""
        return any(isinstance(module, Dropout) and module.p > 0 for module in model.modules())


def one_after_another(rig: Rig, parts: list[Part], total: Tensor) -> Tensor:
    """Forward and backward of the parts in turn; returns the mean loss. The sum of each part is divided by the target
    count of the *whole* logical batch, so parts of unequal length weigh what they should."""
    losses = []
    for index, part in enumerate(parts):
        with rig.sync(index == len(parts) - 1):
            loss = rig.criterion(rig.forward(part), part) / total
            rig.stepper.backward(loss)
        losses.append(loss.detach())
    return torch.stack(losses).sum()


MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@final
@dataclass(frozen=True)
class Rig:
    """The assembled training machine. Knobs make the next one with `dataclasses.replace`."""

    task: Task
    device: torch.device
    model: nn.Module
    forward: Callable[[Part], Any]  # calls the model
    criterion: Callable[[Any, Part], Tensor]  # outputs, part -> the sum over the part's targets
    total: Callable[[list[Part]], Tensor]  # how many targets that are
    make_optimizer: MakeOptimizer = None  # pyright: ignore[reportAssignmentType] # until OPTIMIZER
    stepper: Stepper = None  # pyright: ignore[reportAssignmentType] # until STEPPING
    rounding: Callable[[Tensor, Tensor], None] | None = None  # how an fp32 update lands in weights of fewer bits
    split: Callable[[Part], list[Part]] = lambda batch: [batch]
    sync: Callable[[bool], AbstractContextManager[Any]] = lambda is_last: nullcontext()
    run: Callable[[Rig, list[Part], Tensor], Tensor] = one_after_another
    finish: Callable[[], None] = lambda: None  # what is left to do after the update of a step

    @property
    def trainable(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]


def is_finite(value: Tensor) -> bool:
    """Whether a 0-dim tensor is a number; waits for the device. One without memory counts as a number."""
    return is_fake(value) or bool(torch.isfinite(value))
