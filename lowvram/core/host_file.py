"""Host memory that is a file: its pages are the system's page cache, written to the disk when the system sees fit."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, final

import torch
from torch import Tensor

from lowvram.compat.torch_fake import is_fake
from lowvram.config.errors import require
from lowvram.core import host
from lowvram.core.ledger import is_dense

LARGEST_PIECE_BYTES = 2**30  # of a file
_files: dict[int, HostFile] = {}  # by the ids of storages that lie in them

Settle = Callable[[], None]  # lets the system take back the pages of a region


@final
class HostFile:
    """A file without a name, so that it is gone however the process ends, mapped into memory piece by piece.

    Args:
        folder: where it is; None: the system's temporary folder.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = folder or tempfile.gettempdir()
        self._file: IO[bytes] | None = None
        self._num_bytes = 0
        self._pages: mmap.mmap | None = None  # the newest piece
        self._used_bytes = 0  # of it

    def region(self, num_bytes: int) -> tuple[Tensor, Settle]:
        """The next unused bytes of the file, (num_bytes,) uint8.

        Raises:
            OSError: the disk is full.
        """
        if is_fake(torch.empty(0)):  # in a plan, tensors have no memory
            return host.empty((num_bytes,), torch.uint8, host.DEVICE), nothing
        length = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._pages is None or self._used_bytes + length > len(self._pages):
            # The file doubles, up to a limit: each mapped piece takes a file descriptor, of which there are few.
            self._pages, self._used_bytes = self._grown(max(length, min(self._num_bytes, LARGEST_PIECE_BYTES))), 0
        start, self._used_bytes = self._used_bytes, self._used_bytes + length
        whole = torch.frombuffer(self._pages, dtype=torch.uint8, offset=start, count=num_bytes)
        return host.mark(whole), partial(self._pages.madvise, mmap.MADV_DONTNEED, start, length)

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

    def empty_like(self, tensor: Tensor) -> Tensor:
        """A plain tensor in the file, with the shape, dtype and, if it is dense, strides of another."""
        num_bytes = max(1, tensor.numel() * tensor.itemsize)
        stride = tensor.stride() if is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()
        flat = self.region(num_bytes)[0][: tensor.numel() * tensor.itemsize].view(tensor.dtype)
        there = flat.as_strided(tensor.shape, stride)
        storage = there.untyped_storage()
        if id(storage) not in _files:
            _files[id(storage)] = self
            weakref.finalize(storage, _files.pop, id(storage), None)
        return there

    @torch.no_grad()
    def take_in(self, tensor: Tensor) -> None:
        """Move a tensor's memory, or that of the tensors inside a wrapper subclass, into the file. Small ones stay."""
        for inner in host.plain_tensors(tensor):
            if inner.nbytes >= mmap.PAGESIZE and file_of(inner) is not self and not is_fake(inner):
                inner.data = self.empty_like(inner).copy_(inner)


def file_of(tensor: Tensor) -> HostFile | None:
    """The file in which a plain tensor lies."""
    return _files.get(id(tensor.untyped_storage()))


def check_folder(key: str, folder: str | None) -> None:
    """Raises BadInput for a folder in which no file can be made."""
    is_usable = folder is None or (Path(folder).is_dir() and os.access(folder, os.W_OK | os.X_OK))
    require(is_usable, key, folder, "null or a folder that exists and can be written to")


def nameless_file(folder: str) -> IO[bytes]:
    return tempfile.TemporaryFile(dir=folder, buffering=0)


def nothing() -> None:
    """The `Settle` of host memory without a file, whose pages stay."""
