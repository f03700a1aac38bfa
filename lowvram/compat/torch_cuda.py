"""Private names of torch.cuda: the allocator's history, NVML, forks, and replaced streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowvram.compat.replaced import replaced

memory: Any = torch.cuda.memory


@contextmanager
def allocator_recorded(**options: Any) -> Iterator[None]:
    """Inside it CUDA's allocator records its events, for `allocator_snapshot` and `allocator_page`.

    torch.cuda.memory._record_memory_history, since 2.1 with `enabled`: torch documents it as the way to do this.
    Replaced by the same name without the underscore, if torch makes it public.

    Args:
        options: torch's `context`, `max_entries`, …
    """
    memory._record_memory_history(**options)
    try:
        yield
    finally:
        memory._record_memory_history(enabled=None)


def allocator_snapshot() -> dict[str, Any]:
    """The allocator's segments, and its events since `allocator_recorded` began.

    torch.cuda.memory._snapshot, since 1.13: the public memory_snapshot has no events. Replaced by the same name
    without the underscore, if torch makes it public.
    """
    return memory._snapshot()


def save_allocator_snapshot(path: Path) -> None:
    """Write `allocator_snapshot` as a file that pytorch.org/memory_viz can read.

    torch.cuda.memory._dump_snapshot, since 2.1: torch documents it as the way to do this. Replaced by the same name
    without the underscore, if torch makes it public.
    """
    memory._dump_snapshot(str(path))


def stream_handle(device_index: int) -> int:
    """CUDA's handle of the current stream of a device, for kernels that aren't torch's.

    torch._C._cuda_getCurrentRawStream, since 1.10: the public torch.cuda.current_stream(device).cuda_stream makes an
    object each time, which takes longer than a launch. Replaced by a public name, if torch makes one.
    """
    return torch._C._cuda_getCurrentRawStream(device_index)


def allocator_page(snapshot: dict[str, Any]) -> str:
    """An HTML page that shows the events in a snapshot. (It loads its viewer from the web.)

    torch.cuda._memory_viz.trace_plot, since 2.0. Replaced by a public name, if torch makes one.
    """
    from torch.cuda._memory_viz import trace_plot

    return trace_plot(snapshot)


def nvml_handle(index: int) -> Any:
    """NVML's handle of the card with this index in torch, also if CUDA_VISIBLE_DEVICES hides or reorders cards.

    torch.cuda._get_pynvml_handler, since 2.1: it handles all forms of that variable. Replaced by NVML's search by
    `torch.cuda.get_device_properties(index).uuid`, where that has a uuid.
    """
    handle_of: Any = torch.cuda._get_pynvml_handler
    return handle_of(index)


def is_in_bad_fork() -> bool:
    """Whether this process was forked from one that had used CUDA, so that it can't use CUDA.

    torch.cuda._is_in_bad_fork, since before 1.13: the public is_initialized doesn't say why CUDA isn't initialized.
    Replaced by a public name, if torch makes one.
    """
    return torch.cuda._is_in_bad_fork()


@contextmanager
def streams_replaced(names: dict[str, Any]) -> Iterator[None]:
    """Inside it names of torch.cuda and of torch.cpu, such as Stream and Event, are replaced, and Tensor.record_stream
    does nothing.

    Those of torch.cuda are public since before 1.13, but need a card; those of torch.cpu, since 2.1, which FSDP2 takes
    for tensors of a CPU, don't tell which stream is the current one. Replaced by streams of the CPU, once they do.
    """
    with ExitStack() as undo:
        for module, missing in ((torch.cuda, ()), (torch.cpu, ("Event",))):
            for name in names.keys() - {*missing}:
                undo.enter_context(replaced(module, name, names[name]))
        undo.enter_context(replaced(Tensor, "record_stream", lambda tensor, stream: None))
        yield
