"""Tensors in files without a name: memory that the kernel writes to the disk where it has no room for it."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import Tensor

LEAST_BYTES = 2**20  # smaller tensors are kept in memory


def spilled(folder: Path, tensor: Tensor) -> Tensor:
    """A copy of a tensor on the CPU, in a file of the folder's disk that vanishes with it.

    Raises:
        OSError: the disk has no room for it.
    """
    if tensor.nbytes < LEAST_BYTES:
        return tensor.cpu()
    with TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, tensor.nbytes)  # a full disk would end the process while it writes
        path = f"/proc/self/fd/{file.fileno()}"
        storage: Any = torch.UntypedStorage.from_file(path, shared=True, nbytes=tensor.nbytes)
    return torch.empty(0, dtype=tensor.dtype).set_(storage).view(tensor.shape).copy_(tensor)
