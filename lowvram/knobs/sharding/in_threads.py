"""The ranks of a row as threads of one process, for trials: what they send to each other, and how they end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError
from typing import Any, TypeVar, final

import torch
from torch import Tensor

T = TypeVar("T")
LONGEST_S = 120.0  # that a rank waits for another one


@final
class Meeting:
    """Where the threads of a row bring what they have."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = Barrier(num_ranks, timeout=LONGEST_S)
        self._brought: list[Any] = [None] * num_ranks

    @property
    def size(self) -> int:
        return self._barrier.parties

    def of_all(self, rank: int, brought: T) -> list[T]:
        """What all ranks have brought, in order."""
        self._brought[rank] = brought
        self._barrier.wait()
        found = [*self._brought]
        self._barrier.wait()  # nobody brings the next one before all have this one
        return found

    def sum(self, rank: int, x: Tensor) -> Tensor:
        return torch.stack(self.of_all(rank, x.detach())).sum(0)

    def exchange(self, rank: int, pieces: Sequence[Tensor]) -> list[Tensor]:
        """What each rank has for this one."""
        return [each[rank] for each in self.of_all(rank, pieces)]

    def leave(self) -> None:
        """The others wait for no one."""
        self._barrier.abort()


def on_threads(num_ranks: int, compute: Callable[[Meeting, int], T]) -> list[T]:
    """What each rank computes, all at the same time. Raises what the first one to fail does."""
    meeting = Meeting(num_ranks)

    def run(rank: int) -> T | BaseException:
        try:
            with torch.device("cpu"):
                return compute(meeting, rank)
        except BaseException as error:
            meeting.leave()
            return error

    with ThreadPoolExecutor(num_ranks) as pool:
        found = list(pool.map(run, range(num_ranks)))
    errors = [each for each in found if isinstance(each, BaseException)]
    if errors:
        raise next((each for each in errors if not isinstance(each, BrokenBarrierError)), errors[0])
    return [each for each in found if not isinstance(each, BaseException)]
