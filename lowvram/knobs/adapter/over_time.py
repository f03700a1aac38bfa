"""Options with which, in each step, only some blocks of the model train: which ones follows from the seed and the step
alone. The others have no gradients and no optimizer state in that step.

adapter=lisa: Pan et al., "LISA: Layerwise Importance Sampling for Memory-Efficient Large Language Model Fine-Tuning"
(2024). adapter=progressive: Brock et al., "FreezeOut: Accelerate Training by Progressively Freezing Layers" (2017).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from lowvram.compat.torch_modules import BatchNorm
from lowvram.config.errors import require
from lowvram.core.fact import Fact
from lowvram.core.heaviest import extremes
from lowvram.core.misfits import TAKES_PART
from lowvram.core.probes.weights import REAL_WEIGHTS, SEPARATE_MEMORY
from lowvram.core.rig import Rig
from lowvram.core.seeds import generator_for
from lowvram.core.stepper import Stepper, StepperAround, Update
from lowvram.core.structure import BLOCKS
from lowvram.knobs.adapter.parts import Frozen
from lowvram.knobs.adapter.units import BEFORE, Units

MOST_WITHOUT = 10  # parts in a row in which a model may leave out all blocks that train
Active = frozenset[int]  # the numbers of the units that train, see `Units`


@dataclass(frozen=True)
class OverTime(Frozen):
    """The base of these options."""

    misfits = TAKES_PART
    band = 1e-5  # over the gradients of what trains: of few blocks, so that little evens out
    decides_learning = True
    needs_always = frozenset({BLOCKS, SEPARATE_MEMORY, REAL_WEIGHTS})
    breaks_always = frozenset({Fact.SAME_PARAMS, Fact.UNDOABLE_STEPS})

    def caveat(self, model: nn.Module) -> str:
        has_statistics = any(isinstance(module, BatchNorm) for module in model.modules())
        norms = "; meanwhile their BatchNorm layers normalise by their running statistics" if has_statistics else ""
        return f"{self.what_rests()}{norms}"

    def apply(self, rig: Rig) -> Rig:
        return rig.then_over_time(self.switched)

    def switched(self, rig: Rig, seed: int) -> Rig:
        """The rig whose stepper switches between units."""
        units = Units(rig.model, rig.structure.blocks)
        sizes = units.sizes

        def active_at(step: int) -> Active:
            return or_next(self.active(step, len(sizes) - 2, seed), sizes)

        stepper = SwitchingStepper(rig.stepper, units, active_at)
        heaviest = tuple(partial(stepper.hold, or_next(active, sizes)) for active in self.heaviest(sizes))
        return replace(rig, stepper=stepper, heaviest=heaviest)

    @abstractmethod
    def what_rests(self) -> str:
        """Half a sentence on what doesn't train, and when."""

    @abstractmethod
    def active(self, step: int, num_blocks: int, seed: int) -> Active:
        """The units that train in a step, counted from 0."""

    @abstractmethod
    def heaviest(self, sizes: Sequence[int]) -> Iterable[Active]:
        """Choices of units that `active` may make and with one of which a step takes the most memory.

        Args:
            sizes: the number of elements of each unit.
        """


@final
class SwitchingStepper(StepperAround):
    """Before each step, lets those units of the model train that `active_at` names, and has the inner stepper forget
    the others. Where they rest, they have no gradients, and none is asked for."""

    def __init__(self, inner: Stepper, units: Units, active_at: Callable[[int], Active]) -> None:
        super().__init__(inner)
        self.units, self.active_at = units, active_at
        self.step = 0  # of the run; counts steps without an update, too
        self.active: Active | None = None  # None: not known
        self.num_without = 0  # parts in a row whose loss depends on nothing that trains

    def begin(self, num_parts: int, divisor: Tensor | float = 1.0) -> None:
        active = self.active_at(self.step)
        if active != self.active:
            self.inner.forget(self.units.let_train(active))
            self.active = active
        self.inner.begin(num_parts, divisor)

    def backward(self, loss: Tensor) -> None:
        """The model may have left out the blocks that train: then there are no gradients. If that goes on, the loss
        has no graph at all, or they are never used, and torch says so."""
        self.num_without = 0 if loss.requires_grad else self.num_without + 1
        if 0 < self.num_without <= MOST_WITHOUT:
            loss = loss + torch.zeros_like(loss, requires_grad=True)
        self.inner.backward(loss)

    def update(self) -> Update:
        update = self.inner.update()
        self.step += 1  # afterwards: an update that fails is no step
        return update

    def hold(self, active: Active) -> None:
        """Let these units train in all steps to come."""
        self.active_at = lambda step: active

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self.step, self.active = state["step"], None


def or_next(active: Active, sizes: Sequence[int]) -> Active:
    """These units, if any of them has parameters; else the next one that has, after the last the first."""
    if any(sizes[unit] for unit in active):
        return active
    start = max(active, default=0)
    later = ((start + shift) % len(sizes) for shift in range(1, len(sizes) + 1))
    return frozenset(unit for unit in [next((unit for unit in later if sizes[unit]), None)] if unit is not None)


def check_period(blocks: int, every: int) -> None:
    require(blocks >= 1, "adapter.blocks", blocks, "at least 1")
    require(every >= 1, "adapter.every", every, "at least 1 step")


def blocks_train(num: int) -> str:
    return "1 block trains" if num == 1 else f"{num} blocks train"


@final
@dataclass(frozen=True)
class Lisa(OverTime):
    """`blocks` random blocks train at a time, drawn anew every so many steps, with everything outside the blocks. All
    draws are equally probable, as in the paper."""

    blocks: int = 2
    every: int = 20

    def __post_init__(self) -> None:
        check_period(self.blocks, self.every)

    def what_rests(self) -> str:
        return f"only {blocks_train(self.blocks)} at a time, drawn anew every {self.every} steps"

    def active(self, step: int, num_blocks: int, seed: int) -> Active:
        generator = generator_for(seed, f"lisa {step // self.every}", torch.device("cpu"))
        drawn = torch.randperm(num_blocks, generator=generator)[: self.blocks]
        return frozenset((1 + drawn).tolist()) | {BEFORE, num_blocks + 1}

    def heaviest(self, sizes: Sequence[int]) -> list[Active]:
        last = len(sizes) - 1
        return [chosen | {BEFORE, last} for chosen in extremes(range(1, last), self.blocks, sizes)]


@final
@dataclass(frozen=True)
class Progressive(OverTime):
    """Every `every` steps one more unit freezes for good: what comes before the blocks, then one block after another.
    The last block trains to the end, and what follows it. Autograd stops at the lowest block that trains, so those
    below it keep no activations either."""

    every: int = 100
    frozen: int = 0
    most: int | None = None

    saves = None  # at the first steps the whole model trains, unless `frozen` says otherwise

    def __post_init__(self) -> None:
        require(self.every >= 1, "adapter.every", self.every, "at least 1 step")
        require(self.frozen >= 0, "adapter.frozen", self.frozen, "at least 0 units")
        allowed = f"null (all but the last block) or at least adapter.frozen={self.frozen}"
        require(self.most is None or self.most >= self.frozen, "adapter.most", self.most, allowed)

    def what_rests(self) -> str:
        return f"the model freezes from the bottom up, one block more every {self.every} steps"

    def num_frozen(self, step: int, num_blocks: int) -> int:
        """The number of units that are frozen in a step."""
        most = num_blocks if self.most is None else min(self.most, num_blocks)
        return min(self.frozen + step // self.every, most)

    def active(self, step: int, num_blocks: int, seed: int) -> Active:
        return frozenset(range(self.num_frozen(step, num_blocks), num_blocks + 2))

    def heaviest(self, sizes: Sequence[int]) -> list[Active]:
        return [self.active(0, len(sizes) - 2, 0)]
