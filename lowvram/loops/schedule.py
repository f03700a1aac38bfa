"""schedule: the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from lowvram.config.errors import require


class Schedule(ABC):
    """A factor that multiplies `optimizer.lr`."""

    @abstractmethod
    def factor(self, step: int, num_steps: int) -> float:
        """The factor for update `step` (from 0) of `num_steps`."""


@dataclass(frozen=True)
class Constant(Schedule):
    """The same learning rate throughout."""

    def factor(self, step: int, num_steps: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Cosine(Schedule):
    """From 1 down to `floor` along half a cosine. Loshchilov and Hutter, "SGDR" (2017)."""

    floor: float = 0.1

    def __post_init__(self) -> None:
        require(0 <= self.floor <= 1, "schedule.floor", self.floor, "between 0 and 1")

    def factor(self, step: int, num_steps: int) -> float:
        return half_cosine(step / max(1, num_steps - 1), self.floor)


@dataclass(frozen=True)
class WarmupCosine(Schedule):
    """Up in a straight line over the first `warmup_frac` of the steps, then along half a cosine down to `floor`."""

    warmup_frac: float = 0.05
    floor: float = 0.1

    def __post_init__(self) -> None:
        check_shares(self.warmup_frac, self.floor)

    def factor(self, step: int, num_steps: int) -> float:
        warmup_steps = math.ceil(self.warmup_frac * num_steps)
        if step < warmup_steps:
            return warmup(step, warmup_steps)
        return half_cosine((step - warmup_steps) / max(1, num_steps - 1 - warmup_steps), self.floor)


@dataclass(frozen=True)
class Linear(Schedule):
    """Up in a straight line over the first `warmup_frac` of the steps, then down in one, which would reach `floor` one
    step after the last: the default of Hugging Face's Trainer, with floor 0."""

    warmup_frac: float = 0.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        check_shares(self.warmup_frac, self.floor)

    def factor(self, step: int, num_steps: int) -> float:
        warmup_steps = math.ceil(self.warmup_frac * num_steps)
        if step < warmup_steps:
            return warmup(step, warmup_steps)
        progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
        return 1 - (1 - self.floor) * progress


def check_shares(warmup_frac: float, floor: float) -> None:
    require(0 <= warmup_frac < 1, "schedule.warmup_frac", warmup_frac, "at least 0 and below 1")
    require(0 <= floor <= 1, "schedule.floor", floor, "between 0 and 1")


def warmup(step: int, warmup_steps: int) -> float:
    """Above 0 at the first step, 1 at the first after the warm-up."""
    return (step + 1) / (warmup_steps + 1)


def half_cosine(progress: float, floor: float) -> float:
    """1 at progress 0, `floor` at 1 and after."""
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
