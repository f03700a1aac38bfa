"""schedule: the learning rate as a pure function of the step, and how it follows the size of the batch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

from lowvram.config.errors import require
from lowvram.data.batch_sizes import BatchSizes, RisingSizes, SameSize


class BatchRule(Enum):
    """By which factor `optimizer.lr` is multiplied. The names are what a user types; each value is a power of the
    batch, relative to `schedule.base_batch_size`."""

    none = 0.0
    linear = 1.0  # Goyal et al., "Accurate, Large Minibatch SGD" (2017)
    sqrt = 0.5  # Krizhevsky, "One weird trick for parallelizing convolutional neural networks" (2014)


@dataclass(frozen=True)
class Schedule(ABC):
    """A factor that multiplies `optimizer.lr`: up in a straight line over the warm-up, if there is one, then along the
    option's own curve."""

    batch_rule: BatchRule = BatchRule.none
    base_batch_size: int | None = None
    warmup_samples: int | None = None
    batch_start: int | None = None
    batch_warmup_samples: int | None = None

    def __post_init__(self) -> None:
        base, rule = self.base_batch_size, self.batch_rule
        is_given = rule is BatchRule.none if base is None else base >= 1
        allowed = (
            f"at least 1 with schedule.batch_rule={rule.name}: the train.batch_size for which optimizer.lr is meant"
        )
        require(is_given, "schedule.base_batch_size", base, allowed)
        samples = self.warmup_samples
        require(samples is None or samples >= 0, "schedule.warmup_samples", samples, "null or at least 0")
        start, samples = self.batch_start, self.batch_warmup_samples
        allowed = "at least 1 with schedule.batch_warmup_samples: the samples of the first batch"
        require(samples is None if start is None else start >= 1, "schedule.batch_start", start, allowed)
        allowed = "at least 1 with schedule.batch_start: the samples over which the batch grows"
        is_given = start is None if samples is None else samples >= 1
        require(is_given, "schedule.batch_warmup_samples", samples, allowed)

    def factor(self, step: int, num_steps: int, sizes: BatchSizes) -> float:
        """The factor for update `step` (from 0) of `num_steps`. Its curve goes by samples."""
        seen, size, warmup = sizes.before(step), sizes.at(step), self.warmup(num_steps, sizes)
        if seen < warmup:
            by = (seen + size) / (warmup + size)  # above 0 at the first step, 1 at the first after the warm-up
        else:
            by = self.curve(seen - warmup, sizes.before(num_steps - 1) - warmup, sizes.before(num_steps) - warmup)
        return by * self.of_batch(sizes.largest)

    def sizes(self, batch_size: int) -> BatchSizes:
        """Of the batches of a run whose largest one has `batch_size` samples."""
        if self.batch_start is None or self.batch_warmup_samples is None:
            return SameSize(batch_size)
        return RisingSizes(self.batch_start, batch_size, self.batch_warmup_samples)

    def of_batch(self, batch_size: int) -> float:
        """The factor by `batch_rule`. It is that of the largest batch throughout: where batches grow, as in the papers,
        the learning rate doesn't follow them."""
        return 1.0 if self.base_batch_size is None else (batch_size / self.base_batch_size) ** self.batch_rule.value

    def warmup(self, num_steps: int, sizes: BatchSizes) -> int:
        """How many samples the warm-up takes."""
        return sizes.before(self.warmup_steps(num_steps)) if self.warmup_samples is None else self.warmup_samples

    def warmup_steps(self, num_steps: int) -> int:
        """How many steps it takes unless `warmup_samples` says it. Default: none."""
        del num_steps
        return 0

    @abstractmethod
    def curve(self, done: int, last: int, end: int) -> float:
        """The factor after the warm-up.

        Args:
            done: samples since the warm-up, before the step.
            last: those before the last step.
            end: those after the last step.
        """


@dataclass(frozen=True)
class Constant(Schedule):
    """The same learning rate throughout."""

    def curve(self, done: int, last: int, end: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Cosine(Schedule):
    """From 1 down to `floor` along half a cosine. Loshchilov and Hutter, "SGDR" (2017)."""

    floor: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_floor(self.floor)

    def curve(self, done: int, last: int, end: int) -> float:
        return half_cosine(done / max(1, last), self.floor)


@dataclass(frozen=True)
class WarmupCosine(Cosine):
    """Up in a straight line over the first `warmup_frac` of the steps, then along half a cosine down to `floor`."""

    warmup_frac: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        check_warmup(self.warmup_frac)

    def warmup_steps(self, num_steps: int) -> int:
        return math.ceil(self.warmup_frac * num_steps)


@dataclass(frozen=True)
class Linear(Schedule):
    """Up in a straight line over the first `warmup_frac` of the steps, then down in one, which would reach `floor` one
    step after the last: the default of Hugging Face's Trainer, with floor 0."""

    warmup_frac: float = 0.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_warmup(self.warmup_frac)
        check_floor(self.floor)

    def warmup_steps(self, num_steps: int) -> int:
        return math.ceil(self.warmup_frac * num_steps)

    def curve(self, done: int, last: int, end: int) -> float:
        return 1 - (1 - self.floor) * min(1.0, done / max(1, end))


def check_warmup(warmup_frac: float) -> None:
    require(0 <= warmup_frac < 1, "schedule.warmup_frac", warmup_frac, "at least 0 and below 1")


def check_floor(floor: float) -> None:
    require(0 <= floor <= 1, "schedule.floor", floor, "between 0 and 1")


def half_cosine(progress: float, floor: float) -> float:
    """1 at progress 0, `floor` at 1 and after."""
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
