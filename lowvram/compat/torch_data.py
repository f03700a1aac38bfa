"""Private names of torch's data loaders."""

from __future__ import annotations

from collections.abc import Iterator
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
