"""Buffers outside the device, in host memory or in a file. They are kept and reused for tensors of similar size."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import IO

import torch
from torch import Tensor

from lowvram.compat.torch_fake import is_fake
from lowvram.core import host

CPU = torch.device("cpu")
LARGEST_PIECE_BYTES = 2**30  # of a file
LARGEST_RATIO = 2  # of the size of a free buffer to that of what is put into it


def nothing() -> None:
    """The `settle` of a buffer in host memory, whose pages stay."""


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
    return Pool(File(folder).region)


class File:
    """A file without a name, so that it is gone however the process ends, mapped into memory piece by piece.

    Its pages are the system's page cache: written to the disk when the system sees fit, and no memory of the process.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = folder or tempfile.gettempdir()
        self._file: IO[bytes] | None = None
        self._num_bytes = 0
        self._pages: mmap.mmap | None = None  # the newest piece
        self._used_bytes = 0  # of it

    def region(self, num_bytes: int) -> Buffer:
        """The next unused bytes of the file.

        Raises:
            OSError: the disk is full.
        """
        if is_fake(torch.empty(0)):  # in a plan, tensors have no memory
            return Buffer(host.empty((num_bytes,), torch.uint8, CPU))
        length = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._pages is None or self._used_bytes + length > len(self._pages):
            # The file doubles, up to a limit: each mapped piece takes a file descriptor, of which there are few.
            self._pages, self._used_bytes = self._grown(max(length, min(self._num_bytes, LARGEST_PIECE_BYTES))), 0
        start, self._used_bytes = self._used_bytes, self._used_bytes + length
        whole = torch.frombuffer(self._pages, dtype=torch.uint8, offset=start, count=num_bytes)
        return Buffer(host.mark(whole), partial(self._pages.madvise, mmap.MADV_DONTNEED, start, length))

    def _grown(self, length: int) -> mmap.mmap:
        if self._file is None:
            self._file = nameless_file(self._folder)
            weakref.finalize(self, self._file.close)
        try:
            # Reserve the space: writing to mapped pages of a full disk would raise SIGBUS.
            os.posix_fallocate(self._file.fileno(), self._num_bytes, length)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._folder) from None
        self._num_bytes += length
        return mmap.mmap(self._file.fileno(), length, offset=self._num_bytes - length)


def nameless_file(folder: str) -> IO[bytes]:
    return tempfile.TemporaryFile(dir=folder, buffering=0)
