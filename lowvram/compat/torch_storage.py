"""Private names of torch's storages: their reference count, and when one is resized."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lowvram.compat.replaced import replaced

C: Any = torch._C


def num_holders(tensor: Tensor) -> int:
    """How many hold a tensor or its storage, in Python and C++: the sum of both reference counts.

    torch._C._storage_Use_Count, since 2.2, UntypedStorage._cdata and Tensor._use_count, in 2.11: `sys.getrefcount`
    doesn't count holders in C++, such as the threads of gloo; and whoever holds the tensor itself adds nothing to its
    storage's count. Replaced by public names, if torch makes them.
    """
    held: Any = tensor
    return C._storage_Use_Count(held.untyped_storage()._cdata) + held._use_count()


@contextmanager
def on_storage_resize(call: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Inside it `call` is called with each storage after Python code has resized it, as FSDP2 does with those of
    gathered parameters.

    UntypedStorage.resize_, public since 2.0, is patched: no dispatch mode and no hook sees the call. Replaced by a hook
    of storages, if torch makes one.
    """
    resize = torch.UntypedStorage.resize_

    def resize_and_call(storage: torch.UntypedStorage, num_bytes: int) -> None:
        resize(storage, num_bytes)
        call(storage)

    with replaced(torch.UntypedStorage, "resize_", resize_and_call):
        yield
