"""Private names of torch's data loaders."""

from __future__ import annotations

import multiprocessing

import torch
from torch.utils.data import DataLoader

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
