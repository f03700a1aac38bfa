"""Work on several ranks: processes that know each other through gloo, on this machine's CPU, or through NCCL, each on a
CUDA device of its own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")
TIMEOUT = timedelta(seconds=30)  # of a rank whose partner has failed
LONGEST_S = 900.0  # a process that dies takes what it was to do with it, and the pool waits for that
CONTEXT = multiprocessing.get_context("forkserver")
# To ask CUDA itself whether there is a device would leave it unusable in all processes that are forked later.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
CONTEXT.set_forkserver_preload(["tests.laboratory", "torch._dynamo"])  # once, so that a rank starts in milliseconds


def on_ranks(work: Callable[..., Result], *args: Any, num_ranks: int = 2, backend: str = "gloo") -> list[Result]:
    """What `work(*args)` returns on each rank. It is a function of a module: processes find it by its name."""
    with TemporaryDirectory() as folder, CONTEXT.Pool(num_ranks, has_devices, (num_ranks,)) as pool:
        store = Path(folder) / "store"
        ranks = [(rank, num_ranks, backend, store, work, args) for rank in range(num_ranks)]
        return pool.starmap_async(as_rank, ranks, chunksize=1).get(LONGEST_S)


def has_devices(number: int) -> None:
    """Emulated ones: as many as are needed. Before a process reads what it is to do, whose modules may ask for them."""
    os.environ["EMULATED_DEVICES"] = str(max(number, 2))


@cache
def start_server() -> None:
    """Start the process that ranks are forked from, which imports torch for seconds: before a test's time counts."""
    with CONTEXT.Pool(1) as pool:
        pool.apply(os.getpid)


@contextmanager
def one_rank_alone() -> Iterator[None]:
    """Inside it this process is the only rank of a group of its own, which may have a mesh."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_cards(work: Callable[..., Result], *args: Any, num_ranks: int = 2) -> list[Result]:
    """`on_ranks`, each with its own current CUDA device."""
    return on_ranks(work, *args, num_ranks=num_ranks, backend="cpu:gloo,cuda:nccl")


def as_rank(
    rank: int, num_ranks: int, backend: str, store: Path, work: Callable[..., Result], args: tuple[Any, ...]
) -> Result:
    torch.set_num_threads(1)
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=TIMEOUT)
    try:
        return work(*args)
    finally:
        dist.destroy_process_group()
