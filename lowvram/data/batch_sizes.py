"""How many samples each logical batch has: a pure function of the step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from dataclasses import dataclass
from itertools import count
from typing import final


class BatchSizes(ABC):
    """The sizes of all logical batches of a run, in samples over all ranks."""

    @property
    @abstractmethod
    def largest(self) -> int: ...

    @abstractmethod
    def at(self, step: int) -> int:
        """Of the batch of this step, counted from 0."""

    @abstractmethod
    def before(self, step: int) -> int:
        """How many samples all earlier steps had."""

    @abstractmethod
    def logged(self, num_steps: int) -> dict[str, float]:
        """What is worth logging after so many steps."""

    def steps_for(self, num_samples: float) -> int:
        """How many steps take at least so many samples."""
        most = next(steps for power in count() if self.before(steps := 2**power) >= num_samples)
        return bisect_left(range(most), num_samples, key=self.before)


@final
@dataclass(frozen=True)
class SameSize(BatchSizes):
    """All batches have `size` samples."""

    size: int

    @property
    def largest(self) -> int:
        return self.size

    def at(self, step: int) -> int:
        return self.size

    def before(self, step: int) -> int:
        return step * self.size

    def logged(self, num_steps: int) -> dict[str, float]:
        return {}


@final
class RisingSizes(BatchSizes):
    """Up in a straight line from `start` to `largest` samples, over the first `num_samples`. In between all sizes are
    multiples of `start`, so that batches have few shapes."""

    def __init__(self, start: int, largest: int, num_samples: int) -> None:
        self._start, self._largest, self._num_samples = start, largest, num_samples
        self._before = [0]  # samples before each step, as far as was asked

    @property
    def largest(self) -> int:
        return self._largest

    def at(self, step: int) -> int:
        return self._size_after(self.before(step))

    def before(self, step: int) -> int:
        while len(self._before) <= step and self._before[-1] < self._num_samples:
            self._before.append(self._before[-1] + self._size_after(self._before[-1]))
        known = min(step, len(self._before) - 1)
        return self._before[known] + (step - known) * self._largest

    def _size_after(self, seen: int) -> int:
        """Of the batch that begins after so many samples."""
        size = self._start + (self._largest - self._start) * seen // self._num_samples
        return self._largest if size >= self._largest else size // self._start * self._start

    def logged(self, num_steps: int) -> dict[str, float]:
        return {"data/batch_size": self.at(num_steps - 1), "data/samples": self.before(num_steps)}
