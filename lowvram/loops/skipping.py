"""train.on_nonfinite=skip: a step whose loss or a gradient isn't finite is undone, as if its batch hadn't been there.

Steppers look at the norm of all gradients, over all parts and ranks, before they change a weight. What else such a step
has changed by then is put back here: running statistics and other buffers, random numbers, plain attributes of modules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from lowvram.compat.torch_autograd import set_versions
from lowvram.compat.torch_modules import RunningNorm, own_buffers
from lowvram.config.errors import Incompatible
from lowvram.config.training import OnNonfinite, TrainSettings
from lowvram.core import generators
from lowvram.core.changes import copied
from lowvram.core.fact import Fact
from lowvram.core.generators import States, global_sources, sources_of, states_of
from lowvram.core.knob import Knob, Stage
from lowvram.core.rig import Rig
from lowvram.core.stepper import Stepper, StepperAround, Update
from lowvram.core.untouched import versions
from lowvram.loops.unregistered import numbers_in
from lowvram.tasks import Problem

KEY = "train.on_nonfinite=skip"
SMALL_BYTES = 2**16  # of a buffer that is copied in each step; running statistics are, whatever their size
MOST_TOLD = 3  # skipped steps that are told
ALL_SKIPPED = f"all were skipped, as none was finite ({KEY})"


@final
class Skips:
    """The steps that were skipped.

    Args:
        most_in_row: after how many in a row the next one ends the run; None: none is skipped.
    """

    def __init__(self, most_in_row: int | None) -> None:
        self.most_in_row = most_in_row
        self.num = self.in_row = self.num_told = 0

    def knobs(self) -> Mapping[str, Knob]:
        """They belong to no group: whoever puts a point's knobs together adds them, as those of `Noise`."""
        return {} if self.most_in_row is None else {KEY: SkipNonfinite(self.most_in_row, self)}

    def note(self, update: Update, most_in_row: int) -> Update:
        """Note the update of a step that was undone, and say whether the run goes on. What a smaller loss scale may
        mend is that scale's matter, and isn't counted here."""
        if not update.recoverable:
            if self.in_row >= most_in_row:  # a snapshot of the step before mustn't count this one
                return update
            self.num, self.in_row = self.num + 1, self.in_row + 1
        return update._replace(skipped=True, recoverable=True)

    def has_skipped(self, update: Update, step: int) -> bool:
        """Whether this step was skipped. Tells the first ones."""
        if update.skipped and self.num_told < MOST_TOLD:
            self.num_told += 1
            more = "; further ones are skipped without a word" if self.num_told == MOST_TOLD else ""
            print(f"step {step} is skipped: its loss or a gradient isn't finite ({KEY}){more}")
        return update.skipped

    def state(self) -> dict[str, Any]:
        return {} if self.most_in_row is None else {"num": self.num, "in_row": self.in_row}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.num, self.in_row = index(state.get("num", 0)), index(state.get("in_row", 0))


def skips_of(train: TrainSettings) -> Skips:
    """What `train.on_nonfinite` asks for."""
    return Skips(train.max_skipped if train.on_nonfinite is OnNonfinite.skip else None)


@final
@dataclass(frozen=True)
class SkipNonfinite(Knob):
    """Undoes steps that aren't finite; changes no other."""

    most_in_row: int
    found: Skips = field(default_factory=lambda: Skips(None), repr=False, compare=False)

    stage = Stage.NUMERICS
    needs_always = frozenset({Fact.UNDOABLE_STEPS, Fact.PLAIN_BACKWARD})

    def apply(self, rig: Rig) -> Rig:
        criterion = rig.task.loss_parts() if isinstance(rig.task, Problem) else None
        touched = Touched([rig.model] if criterion is None else [rig.model, criterion])
        return replace(rig, stepper=SkippingStepper(rig.stepper, touched, self.found, self.most_in_row))


@final
class SkippingStepper(StepperAround):
    """Makes the gradients of a part whose loss isn't finite nan, so that the stepper inside leaves the update out, and
    puts back what the step has changed."""

    def __init__(self, inner: Stepper, touched: Touched, skips: Skips, most_in_row: int) -> None:
        super().__init__(inner)
        self.touched, self.skips, self.most_in_row = touched, skips, most_in_row

    def begin(self, num_parts: int, divisor: Tensor | float = 1.0) -> None:
        self.touched.look()
        self.inner.begin(num_parts, divisor)

    def backward(self, loss: Tensor) -> None:
        """Without waiting for the device. Times 1 it is the same loss, and has the same gradients."""
        self.inner.backward(loss * torch.ones_like(loss).where(loss.detach().isfinite(), math.nan))

    def update(self) -> Update:
        update = self.inner.update()
        if update.applied:
            self.skips.in_row = 0
            return update
        self.touched.put_back()
        return self.skips.note(update, self.most_in_row)

    def figures(self) -> Mapping[str, float]:
        return {**self.inner.figures(), "training.skipped_steps": self.skips.num}


class Held(NamedTuple):
    """A buffer before a step."""

    what: str  # for messages: "BatchNorm2d.running_mean"
    owner: MutableMapping[str, Tensor | None]
    name: str
    tensor: Tensor
    copy: Tensor | None  # None: it is too large


@final
class Touched:
    """What a step may change in modules and generators before its update.

    Copies of buffers are made once, and written to in each step: they take that memory for the whole run.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = [each for module in modules for each in module.modules()]
        self.roots = modules
        self.held: list[Held] = []
        self.of_buffers: list[int] = []  # their versions
        self.numbers: list[tuple[nn.Module, dict[str, Any]]] = []
        self.states: States = []

    def buffers(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        for module in self.modules:
            for name, tensor in own_buffers(module).items():
                if tensor is not None:
                    yield module, name, tensor

    @torch.no_grad()
    def look(self) -> None:
        """Called before a step."""
        self.states = states_of([*global_sources(), *(each for root in self.roots for each in sources_of(root))])
        self.numbers = [(module, found) for module in self.modules if (found := numbers_in(module))]
        now = list(self.buffers())
        is_same = len(now) == len(self.held) and all(
            tensor is held.tensor for (*_, tensor), held in zip(now, self.held, strict=True)
        )
        if not is_same:
            self.held = [held_of(*each) for each in now]
        else:
            for held in self.held:
                if held.copy is not None:
                    held.copy.copy_(held.tensor)
        self.of_buffers = versions([held.tensor for held in self.held])

    @torch.no_grad()
    def put_back(self) -> None:
        """Have all as it was before the step.

        Raises:
            Incompatible: the step has changed a buffer in place that is too large to be copied each time.
        """
        now = versions([held.tensor for held in self.held])
        for held, before, after in zip(self.held, self.of_buffers, now, strict=True):
            held.owner[held.name] = held.tensor
            if held.copy is not None:  # whatever its version: kernels of norms don't count their changes
                held.tensor.copy_(held.copy)
                if not held.tensor.is_inference():
                    set_versions([held.tensor], before)  # it counts no sample of the step
            elif before != after:
                raise Incompatible(
                    f"{KEY} needs that a step which is left out leaves nothing behind, and this one has changed"
                    f" {held.what}, a buffer too large to be copied in each step: choose train.on_nonfinite=stop"
                )
        for module, numbers in self.numbers:
            vars(module).update(numbers)
        generators.restore(generators.moved(self.states))


def held_of(module: nn.Module, name: str, tensor: Tensor) -> Held:
    is_copied = isinstance(module, RunningNorm) or tensor.numel() * tensor.element_size() <= SMALL_BYTES
    what = f"{type(module).__name__}.{name}"
    return Held(what, own_buffers(module), name, tensor, copied(tensor) if is_copied else None)
