"""Marks operators whose results the backward pass computes again, so that nothing keeps them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_IS_RECOMPUTED = ContextVar("is_recomputed", default=False)  # of the thread: a card's backward pass has its own


@contextmanager
def recomputed_later() -> Iterator[None]:
    """Around operators whose results the backward pass computes again."""
    token = _IS_RECOMPUTED.set(True)
    try:
        yield
    finally:
        _IS_RECOMPUTED.reset(token)


def is_recomputed_later() -> bool:
    """Whether the running operator is inside `recomputed_later`."""
    return _IS_RECOMPUTED.get()
