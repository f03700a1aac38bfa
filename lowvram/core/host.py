"""Host memory that stands in for device memory: where it comes from, and how much travels to it and back.

On a CPU device nothing really moves, but what a knob keeps here is host memory all the same, so that the ledger counts
on every machine what a card would hold.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lowvram.compat.torch_modes import is_traceable_wrapper_subclass

MOST_WAITS = 64  # that are kept to be asked for their time later


@dataclass
class Traffic:
    """What has moved between host and device since the process began, and how long computing stood still for it."""

    to_host_bytes: int = 0
    to_device_bytes: int = 0
    _waited_s: float = 0.0
    _waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=deque)

    def so_far(self) -> dict[str, float]:
        """All of it by name; waits for the device."""
        sizes = {"to_host_bytes": self.to_host_bytes, "to_device_bytes": self.to_device_bytes}
        return {**sizes, "waited_ms": self.waited_ms()}

    def waited_ms(self) -> float:
        """Waits for the device."""
        self._sum_up(0)
        return self._waited_s * 1e3

    def _sum_up(self, most: int) -> None:
        """Ask the oldest waits for their time, until at most so many are left."""
        while len(self._waits) > most:
            before, after = self._waits.popleft()
            after.synchronize()
            self._waited_s += before.elapsed_time(after) / 1e3

    @contextmanager
    def waiting(self, device: torch.device) -> Iterator[None]:
        """The block makes the device's current stream, or the CPU, wait for a copy."""
        if device.type == "cuda":
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            yield
            after.record()
            self._waits.append((before, after))
            self._sum_up(MOST_WAITS)
        else:
            began = time.perf_counter()
            yield
            self._waited_s += time.perf_counter() - began


traffic = Traffic()  # a point is a process
listeners: list[Callable[[Tensor], Any]] = []  # called with each tensor that becomes host memory
_blocks = 0  # of `computing`, open ones
DEVICE = torch.device("cpu")
_kept = WeakIdKeyDictionary()  # tensors without memory that belong here
_storages: dict[int, weakref.finalize[..., Any]] = {}  # those that are host memory, by their id


def empty(shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A CPU tensor for what belongs to `device`: pinned for CUDA, or pageable, aloud, where that is limited (WSL)."""
    tensor = torch.empty(shape, dtype=dtype)
    if device.type == "cuda":
        tensor = _pinned(tensor)
    return mark(tensor)


def mark(tensor: Tensor) -> Tensor:
    """The same tensor, its storages known as host memory from now on."""
    for storage in storages(tensor):
        if id(storage) not in _storages:
            _storages[id(storage)] = weakref.finalize(storage, _storages.pop, id(storage), None)
    for tell in listeners:
        tell(tensor)
    return tensor


def is_marked(storage: torch.UntypedStorage) -> bool:
    """Whether the ledger counts a storage as host memory on a CPU device too."""
    return id(storage) in _storages


def is_anything_marked() -> bool:
    """Whether there is any such memory."""
    return bool(_storages)


@contextmanager
def computing() -> Iterator[None]:
    """The host computes for itself inside the block: what is born there is its memory, on a CPU device too."""
    global _blocks
    _blocks += 1
    try:
        yield
    finally:
        _blocks -= 1


def is_computing() -> bool:
    return _blocks > 0


def holds(tensor: Tensor) -> bool:
    """Whether a tensor lies in memory that is known as the host's."""
    return all(map(is_marked, storages(tensor)))


def storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    """The storages behind a tensor: one, or those of the tensors inside a wrapper subclass (shards, low-bit states)."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        inner = [getattr(tensor, name) for name in names]
        return [storage for each in inner if isinstance(each, Tensor) for storage in storages(each)]
    return [tensor.untyped_storage()]


def keep(tensor: Tensor) -> None:
    """A tensor that has no memory yet is to get some on the host."""
    _kept[tensor] = True


def is_kept(tensor: Tensor) -> bool:
    return tensor in _kept


def is_device(device: torch.device) -> bool:
    """Whether the device's own memory is the host's, so that only marks tell them apart."""
    return device.type == DEVICE.type


def copies_overlap(device: torch.device) -> bool:
    """Whether copies to the host and back go on beside the computation. A plan for a card answers for that card."""
    return device.type == "cuda"


def _pinned(tensor: Tensor) -> Tensor:
    try:
        return tensor.pin_memory()
    except RuntimeError as error:  # not AcceleratorError alone: the class differs between versions
        _say_pageable(str(error).splitlines()[0])
        return tensor


@cache
def _say_pageable(why: str) -> None:
    warnings.warn(f"host memory stays pageable, so copies to it are slower: {why}", stacklevel=3)
