"""Loops whose rounds are alike: a plan follows three rounds of them, whatever their number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TypeVar

Round = TypeVar("Round")
StandsFor = Callable[[int], AbstractContextManager[None]]  # inside it, what is done stands for so many rounds

_STANDS_FOR: ContextVar[StandsFor | None] = ContextVar("stands_for", default=None)


def followed(rounds: Sequence[Round], backwards: bool = False) -> Iterator[Round]:
    """The rounds of a loop, which do the same work on tensors of the same sizes, but for the last, which may be
    smaller; or whose sizes grow evenly. Inside `three_followed` the first, the middle one for all between, and the
    last.

    Args:
        backwards: the last one first.
    """
    stands_for, step = _STANDS_FOR.get(), -1 if backwards else 1
    if stands_for is None or len(rounds) <= 3:
        yield from rounds[::step]
        return
    first, last = (rounds[0], rounds[-1])[::step]
    yield first
    with stands_for(len(rounds) - 2):
        yield rounds[len(rounds) // 2]
    yield last


@contextmanager
def three_followed(stands_for: StandsFor | None) -> Iterator[None]:
    """Inside it loops over `followed` leave out rounds: for tensors without values.

    Args:
        stands_for: None: they leave out none, as a trial with values must inside a plan.
    """
    token = _STANDS_FOR.set(stands_for)
    try:
        yield
    finally:
        _STANDS_FOR.reset(token)
