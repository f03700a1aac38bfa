"""Private names of torch.cuda: the allocator's history, NVML, forks, and streams that aren't there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

memory: Any = torch.cuda.memory


@contextmanager
def allocator_recorded(**options: Any) -> Iterator[None]:
    """Inside it every action of CUDA's allocator is kept, for `allocator_snapshot` and the pages made of it.

    torch.cuda.memory._record_memory_history, since 2.1 with `enabled`: torch documents it as the way to do this.
    Replaced by the same name without the underscore, if torch makes it public.

    Args:
        options: see torch: `context`, `max_entries`.
    """
    memory._record_memory_history(**options)
    try:
        yield
    finally:
        memory._record_memory_history(enabled=None)


def allocator_snapshot() -> dict[str, Any]:
    """The allocator's segments, and its actions since `allocator_recorded` began.

    torch.cuda.memory._snapshot, since 1.13: the public memory_snapshot has no actions. Replaced by the same name
    without the underscore, if torch makes it public.
    """
    return memory._snapshot()


def save_allocator_snapshot(path: Path) -> None:
    """Write `allocator_snapshot` where pytorch.org/memory_viz can read it.

    torch.cuda.memory._dump_snapshot, since 2.1: torch documents it as the way to do this. Replaced by the same name
    without the underscore, if torch makes it public.
    """
    memory._dump_snapshot(str(path))


def allocator_page(snapshot: dict[str, Any]) -> str:
    """A page of HTML that shows the actions in a snapshot. (Its viewer comes from the web.)

    torch.cuda._memory_viz.trace_plot, since 2.0. Replaced by a public name, if torch makes one.
    """
    from torch.cuda._memory_viz import trace_plot

    return trace_plot(snapshot)


def nvml_handle(index: int) -> Any:
    """What NVML calls the card of this index, also where CUDA_VISIBLE_DEVICES has hidden or reordered some.

    torch.cuda._get_pynvml_handler, since 2.1: it knows about all of the variable's forms. Replaced by NVML's search by
    `torch.cuda.get_device_properties(index).uuid`, where that has a uuid.
    """
    handle_of: Any = torch.cuda._get_pynvml_handler
    return handle_of(index)


def is_in_bad_fork() -> bool:
    """Whether this process was forked off one that had used CUDA, so that it can't use it.

    torch.cuda._is_in_bad_fork, since before 1.13: the public is_initialized only tells that it isn't ready. Replaced by
    a public name, if torch makes one.
    """
    return torch.cuda._is_in_bad_fork()


@contextmanager
def streams_replaced(names: dict[str, Any]) -> Iterator[None]:
    """Inside it these names of torch.cuda, such as Stream and Event, are others, and no tensor notes which streams use
    it.

    torch.cuda and Tensor.record_stream are public since before 1.13; what they need is a card. Replaced by streams of
    the CPU (torch.cpu.Stream, since 2.1, has no events to wait for), once they do nothing in the same way.
    """
    with ExitStack() as undo:
        undo.enter_context(patch.multiple(torch.cuda, **names))
        undo.enter_context(patch.object(Tensor, "record_stream", lambda tensor, stream: None))
        yield
