"""Host memory in which knobs keep data instead of on the device: its allocation, and a count of copies to it and back.

On a CPU device nothing really moves, but such memory is marked as host memory all the same, so that the ledger counts
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

MOST_WAITS = 64  # pairs of CUDA events that are kept before their times are read


@dataclass
class Traffic:
    """Bytes copied between host and device since the process began, and how long the computation waited for copies."""

    to_host_bytes: int = 0
    to_device_bytes: int = 0
    _waited_s: float = 0.0
    _waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=deque)

    def so_far(self) -> dict[str, float]:
        """All three figures by name. Waits for the device."""
        sizes = {"to_host_bytes": self.to_host_bytes, "to_device_bytes": self.to_device_bytes}
        return {**sizes, "waited_ms": self.waited_ms()}

    def waited_ms(self) -> float:
        """How long the computation waited for copies. Waits for the device."""
        self._sum_up(0)
        return self._waited_s * 1e3

    def _sum_up(self, most: int) -> None:
        """Read the times of the oldest waits, until at most `most` are left."""
        while len(self._waits) > most:
            before, after = self._waits.popleft()
            after.synchronize()
            self._waited_s += before.elapsed_time(after) / 1e3

    @contextmanager
    def waiting(self, device: torch.device) -> Iterator[None]:
        """Count how long a block makes the device's current stream, or the CPU, wait for a copy."""
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


Room = Callable[[Tensor], Tensor]  # makes a tensor in host memory that is like another
traffic = Traffic()  # of this process, which runs one point
listeners: list[Callable[[Tensor], Any]] = []  # called with each tensor that is marked as host memory
_num_computing = 0  # open blocks of `computing`
DEVICE = torch.device("cpu")  # of host memory
_rooms = WeakIdKeyDictionary()  # of tensors without memory for which `assign` was called: what makes them some
_storages: dict[int, weakref.finalize[..., Any]] = {}  # those marked as host memory, by id


def empty(shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A CPU tensor for data of `device`, marked as host memory. For CUDA it is pinned; if pinning fails, as where
    pinned memory is limited (WSL), it is pageable, with a warning."""
    return mark(pinned(torch.empty(shape, dtype=dtype), device))


def empty_like(tensor: Tensor, pin: bool) -> Tensor:
    """A tensor in host memory with the shape and dtype of `tensor`, and laid out over the ranks as it is; pinned if
    `pin`, unless that fails, as in `empty`."""
    try:
        return mark(torch.empty_like(tensor, device=DEVICE, pin_memory=pin, requires_grad=False))
    except RuntimeError as error:
        if not pin:
            raise
        _say_pageable(str(error).splitlines()[0])
        return empty_like(tensor, pin=False)


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor from which copies to `device` need not be waited for: for CUDA it is pinned, as in `empty`."""
    return _pinned(tensor) if device.type == "cuda" else tensor


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device. The device copies it when it gets there; nobody waits for that if the tensor is pinned.
    A plan for a card patches this function, as its fake tensors are on the CPU."""
    return tensor.to(device, non_blocking=True)


def arrived(tensor: Tensor) -> Tensor:
    """The tensor, which has been copied to the host, marked as host memory. A plan for a card patches this function, as
    its fake tensors are on the CPU: what was copied is still on the card."""
    return mark(tensor)


def mark(tensor: Tensor) -> Tensor:
    """Mark the tensor's storages as host memory, and return the tensor."""
    for storage in storages(tensor):
        if id(storage) not in _storages:
            _storages[id(storage)] = weakref.finalize(storage, _storages.pop, id(storage), None)
    for listener in listeners:
        listener(tensor)
    return tensor


def is_marked(storage: torch.UntypedStorage) -> bool:
    """Whether a storage is marked as host memory."""
    return id(storage) in _storages


def is_anything_marked() -> bool:
    """Whether any storage is marked as host memory."""
    return bool(_storages)


@contextmanager
def computing() -> Iterator[None]:
    """Inside it the host's processor computes, also if the device is a CPU: tensors made there count as host memory."""
    global _num_computing
    _num_computing += 1
    try:
        yield
    finally:
        _num_computing -= 1


def is_computing() -> bool:
    return _num_computing > 0


def holds(tensor: Tensor) -> bool:
    """Whether all storages of a tensor are marked as host memory."""
    return all(map(is_marked, storages(tensor)))


def storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    """The storages behind a tensor: one, or those of the tensors inside a wrapper subclass (shards, low-bit states)."""
    return [inner.untyped_storage() for inner in plain_tensors(tensor)]


def plain_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensor itself; of a wrapper subclass, the tensors inside."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    inner_tensors = [inner for name in names if isinstance(inner := getattr(tensor, name), Tensor)]
    return [plain for inner in inner_tensors for plain in plain_tensors(inner)]


def pageable(tensor: Tensor) -> Tensor:
    return empty_like(tensor, pin=False)


def assign(tensor: Tensor, room: Room = pageable) -> None:
    """Have a tensor that has no memory yet get host memory from `room`, once `materialise` gives it some."""
    _rooms[tensor] = room


def room_of(tensor: Tensor) -> Room | None:
    """With which `assign` was called for this tensor."""
    return _rooms.get(tensor)


def is_assigned(tensor: Tensor) -> bool:
    return tensor in _rooms


def is_device(device: torch.device) -> bool:
    """Whether the device is a CPU, so that only marks distinguish its memory from host memory."""
    return device.type == DEVICE.type


def copies_overlap(device: torch.device) -> bool:
    """Whether copies to the host and back run in parallel with the computation. A plan for a card patches this
    function, as its fake tensors are on the CPU."""
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
