"""Work on several ranks: processes that know each other through gloo, on this machine's CPU."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")
TIMEOUT = timedelta(seconds=30)  # of a rank whose partner has failed
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.laboratory", "torch._dynamo"])  # once, so that a rank starts in milliseconds


def on_ranks(work: Callable[..., Result], *args: Any, num_ranks: int = 2) -> list[Result]:
    """What `work(*args)` returns on each rank. It is a function of a module: processes find it by its name."""
    with TemporaryDirectory() as folder, CONTEXT.Pool(num_ranks) as pool:
        store = Path(folder) / "store"
        return pool.starmap(as_rank, [(rank, num_ranks, store, work, args) for rank in range(num_ranks)], chunksize=1)


def as_rank(rank: int, num_ranks: int, store: Path, work: Callable[..., Result], args: tuple[Any, ...]) -> Result:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=TIMEOUT)
    try:
        return work(*args)
    finally:
        dist.destroy_process_group()
