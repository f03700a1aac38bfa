"""How many samples each logical batch has: a pure function of the step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
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
