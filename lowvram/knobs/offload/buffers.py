"""Buffers outside the device, in host memory or in a file. They are kept and reused for tensors of similar size."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lowvram.core import host
from lowvram.core.host_file import HostFile, nothing

LARGEST_RATIO = 2  # of the size of a free buffer to that of what is put into it


@dataclass(eq=False)
class Buffer:
    """Memory outside the device."""

    bytes: Tensor  # uint8 (bytes,)
    settle: Callable[[], None] = nothing  # called after a copy: lets the system take back the pages of a file

    def like(self, dtype: torch.dtype, num_elements: int) -> Tensor:
        """A view of its beginning: (num_elements,) in `dtype`."""
        return self.bytes[: num_elements * dtype.itemsize].view(dtype)


class Pool:
    """Makes buffers and keeps those that are free again. It grows in the first step, and later a little if steps
    differ."""

    def __init__(self, make: Callable[[int], Buffer]) -> None:
        self._make = make
        self._free: list[Buffer] = []  # the smallest first

    def take(self, num_bytes: int) -> Buffer:
        """The smallest free buffer that is large enough, unless it is far too large; else a new one."""
        place = bisect_left(self._free, num_bytes, key=_num_bytes)
        if place < len(self._free) and _num_bytes(self._free[place]) <= LARGEST_RATIO * num_bytes:
            return self._free.pop(place)
        return self._make(num_bytes)

    def give_back(self, buffer: Buffer) -> None:
        insort(self._free, buffer, key=_num_bytes)


def _num_bytes(buffer: Buffer) -> int:
    return buffer.bytes.nbytes


def in_host_memory(device: torch.device) -> Pool:
    """Buffers in host memory, pinned for a card."""
    return Pool(lambda num_bytes: Buffer(host.empty((num_bytes,), torch.uint8, device)))


def in_file(folder: str | None) -> Pool:
    """Buffers in a nameless file in `folder` (None: the system's temporary folder), which ends with the process."""
    file = HostFile(folder)
    return Pool(lambda num_bytes: Buffer(*file.region(num_bytes)))
