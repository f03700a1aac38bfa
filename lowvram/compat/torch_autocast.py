"""Private names of torch's autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def same_autocast() -> Iterator[None]:
    """Around code of the user's: afterwards autocast is as it was before, also if the code has left it on.

    torch.autocast_increment_nesting, autocast_decrement_nesting and clear_autocast_cache, since before 1.13: autocast's
    own `__enter__` and `__exit__` call them. Unless the depth is what it was, weights that autocast has cast are kept
    for ever, and not cast again when they change. Replaced by a public way to read the depth, if torch makes one.
    """
    kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    before = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    is_cached, depth = torch.is_autocast_cache_enabled(), nesting()
    try:
        yield
    finally:
        for kind, is_enabled, dtype in before:
            torch.set_autocast_enabled(kind, is_enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(is_cached)
        while nesting() > depth:
            torch.autocast_decrement_nesting()
        while nesting() < depth:
            torch.autocast_increment_nesting()
        if depth == 0:
            torch.clear_autocast_cache()


def nesting() -> int:
    """How many autocasts are entered.

    torch.autocast_increment_nesting and autocast_decrement_nesting, since before 1.13. Replaced like `same_autocast`.
    """
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
