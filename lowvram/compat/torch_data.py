"""Private names of torch's data loaders."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from multiprocessing.queues import Queue
from types import TracebackType
from typing import Any


def end_workers(batches: Iterator[Any]) -> None:
    """End the worker processes of a DataLoader.

    torch.utils.data.dataloader._MultiProcessingDataLoaderIter._shutdown_workers, since before 1.13: torch calls it when
    the last reference to the iterator goes, but the traceback of an exception may hold one. Replaced by a public way
    to close the iterator, if torch makes one.

    Args:
        batches: `iter` of a DataLoader with workers.
    """
    end: Any = batches
    end._shutdown_workers()


def says_timed_out(error: RuntimeError) -> bool:
    """Whether a DataLoader says that no batch has come within its `timeout`; its next batch may be asked for again.

    The message "DataLoader timed out after ..." of torch.utils.data.dataloader, since before 1.13. Replaced by an error
    of its own class, if torch raises one.
    """
    return str(error).startswith("DataLoader timed out after")


def tell_what_is_not_sent() -> None:
    """In a worker of a DataLoader: a batch that threads of Python's own can't send is one line instead of a traceback.
    The queue's thread calls a hook; the one that hands on descriptors calls sys.excepthook.

    multiprocessing.queues.Queue._on_queue_feeder_error, since 3.7 of Python, whose docstring calls it a private hook.
    Replaced by a public one, if Python gets it.
    """
    hook: Any = Queue
    before = sys.excepthook

    def tell(error: BaseException, *_: Any) -> None:
        print(f"a loader's worker can't send a batch: {error}", file=sys.stderr)

    def except_hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        tell(error) if isinstance(error, OSError) else before(kind, error, trace)

    hook._on_queue_feeder_error = staticmethod(tell)
    sys.excepthook = except_hook
