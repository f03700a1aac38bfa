"""Private names of torch's data loaders."""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.compat.sentences import needed


@needed("torch.utils.data.dataloader._MultiProcessingDataLoaderIter._shutdown_workers", by="loader=workers")
def test_workers_end_when_they_are_told_to() -> None:
    from lowvram.compat.torch_data import end_workers

    data: list[int] = list(range(8))
    before = set(multiprocessing.active_children())
    loader = DataLoader(data, num_workers=2, multiprocessing_context="fork", generator=torch.Generator())  # pyright: ignore
    batches = iter(loader)
    assert next(batches).item() == 0
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    end_workers(batches)
    assert not any(worker.is_alive() for worker in workers)


@needed("the message of torch.utils.data.DataLoader's timeout", by="a loader that waits for slow batches")
def test_a_batch_that_is_late_is_told_apart_and_still_comes() -> None:
    from lowvram.compat.torch_data import says_timed_out

    class Slow(Dataset[int]):
        def __getitem__(self, index: int) -> int:
            time.sleep(0.5)
            return index

        def __len__(self) -> int:
            return 2

    batches = iter(DataLoader(Slow(), batch_size=None, num_workers=1, timeout=0.1, multiprocessing_context="fork"))
    found, num_late = [], 0
    while len(found) < 2:
        try:
            found.append(next(batches))
        except RuntimeError as error:
            num_late += says_timed_out(error)
    assert (found, num_late > 0) == ([0, 1], True)
    assert not says_timed_out(RuntimeError("another"))


@needed("multiprocessing.queues.Queue._on_queue_feeder_error", by="the line about a batch that can't be sent")
def test_what_cannot_be_sent_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    from lowvram.compat.torch_data import tell_what_is_not_sent

    def send() -> None:
        tell_what_is_not_sent()
        sharing = threading.Thread(target=lambda: sys.excepthook(OSError, OSError("too many open files"), None))
        sharing.start()  # as Python's thread that hands on descriptors
        sharing.join()
        queue.put(lambda: None)
        queue.close()
        queue.join_thread()

    queue = multiprocessing.get_context("fork").Queue()
    worker = multiprocessing.get_context("fork").Process(target=send)
    worker.start()
    worker.join()
    said = capfd.readouterr().err
    assert said.startswith("a loader's worker can't send a batch: too many open files\na loader's worker can't send a")
    assert said.count("\n") == 2
