"""Runs operators late, as a card does: the CPU kernel that computes an operator's values is put into the queue of its
stream (device/streams.c), and runs when somebody waits for the stream, or at a random time. Like a late CUDA kernel it
reads and writes memory that may belong to another tensor by then.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tests.emulated_cuda.overlay import is_strided, on_cpu, over, write

IS_LATE = os.environ.get("EMULATED_LATE", "0") not in ("", "0")
# Parts of the names of operators that wait for the device on a real card, too.
AT_ONCE = [
    "nonzero",
    "unique",
    "masked_select",
    "repeat_interleave",
    "bincount",
    "equal",
    "item",
    "_local_scalar",
    "is_nonzero",
    "_assert_async",
    "histc",
    "linalg",
]

_waiting: dict[int, Callable[[], None]] = {}
_numbers = count(1)


class Operator(Protocol):
    """The part of `values.Valued` that is used here."""

    name: str
    is_fresh: bool

    def values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def fresh(self, result: Any, values: Any) -> Any: ...


def is_at_once(name: str, returns: Any) -> bool:
    return any(part in name for part in AT_ONCE) or any("Tensor" not in str(each.type) for each in returns)


@cache
def device() -> ctypes.CDLL:
    """The emulated device's library."""
    library = ctypes.CDLL("libemulated_core.so")
    library.emulated_call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long]
    library.emulated_finish.argtypes = library.emulated_is_known.argtypes = [ctypes.c_void_p]
    library.emulated_set_seed.argtypes = [ctypes.c_uint]
    atexit.register(library.emulated_end)
    return library


def set_seed(seed: int) -> None:
    """Run everything that is queued; from then on streams are late as in a process started with EMULATED_SEED=seed."""
    device().emulated_set_seed(seed)


def stream() -> int:
    return torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())


def finish() -> None:
    """Run everything that is queued on the current stream."""
    device().emulated_finish(stream())


@ctypes.CFUNCTYPE(None, ctypes.c_long)
def _run(number: int) -> None:
    was_enabled = gc.isenabled()
    gc.disable()  # a destructor could call the device, whose lock is held here
    try:
        _waiting.pop(number)()
    finally:
        if was_enabled:
            gc.enable()


def put(function: Callable[[], None]) -> None:
    """Queue `function` on the current stream. It will run with the dispatcher's present state."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()

    def run() -> None:
        with torch._C._ForceDispatchKeyGuard(include, exclude), torch._C.DisableTorchFunction(), torch.no_grad():
            function()

    _waiting[number := next(_numbers)] = run
    device().emulated_call(stream(), ctypes.cast(_run, ctypes.c_void_p), number)


def is_pageable(tensor: Tensor) -> bool:
    return not device().emulated_is_known(tensor.data_ptr())


def enqueue(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
    """Queue the computation of `operator`; False if it must be computed now. Keeps no tensor of the device alive;
    pageable memory is read now."""
    is_copy = operator.name in ("copy_", "_copy_from")
    on_host = [leaf for leaf in tree_leaves(args) if is_on_host(leaf)]
    if is_copy and on_host and is_plain_copy(*args[:2]):
        return True  # cudaMemcpyAsync does it
    if is_copy and is_on_host(args[0]) and is_pageable(args[0]):
        return False
    later_args, later_kwargs = tree_map(lambda each: as_read_later(each, is_copy), (args, kwargs))
    places = tree_map(lambda each: over(each) if is_strided(each) else None, result) if operator.is_fresh else None

    def compute() -> None:
        values = operator.values(later_args, later_kwargs)
        for place, value in operator.fresh(places, values) if places is not None and values is not None else []:
            if isinstance(place, Tensor) and isinstance(value, Tensor):
                write(place, value)

    put(compute)
    if is_copy and on_host and not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)):
        finish()
    return True


def is_on_host(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() > 0


def is_plain_copy(to: Tensor, source: Tensor) -> bool:
    is_whole = to.is_contiguous() and source.is_contiguous()
    return is_whole and to.dtype == source.dtype and to.shape == source.shape


def as_read_later(value: Any, is_copy: bool) -> Any:
    """An argument for a later computation: copies read pinned memory later, all other host memory is copied now."""
    if is_on_host(value) and is_strided(value):
        return over(value) if is_copy and not is_pageable(value) else value.clone()
    return on_cpu(value)
