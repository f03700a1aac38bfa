"""Host memory: known to the ledger, and what travels is counted."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from lowvram.core import host
from lowvram.core.kind import Kind
from lowvram.core.ledger import ledger
from tests.laboratory import CPU, needs_gpu, needs_real_gpu


def test_what_is_kept_on_the_host_is_no_device_memory_on_a_cpu_either() -> None:
    with ledger(nn.Linear(2, 2)) as peak:
        kept, plain = host.empty((1024,), torch.float32, CPU), torch.empty(512)
    assert peak.by_kind_max[Kind.HOST] == kept.nbytes
    assert peak.peak_bytes == plain.nbytes + 2 * 512


def test_what_the_host_computes_for_itself_is_its_memory() -> None:
    with ledger(nn.Linear(2, 2)) as peak:
        with host.computing():
            mine = torch.empty(1024)
        theirs = torch.empty(512)
    assert peak.by_kind_max[Kind.HOST] == mine.nbytes
    assert peak.peak_bytes == theirs.nbytes + 2 * 512


def test_a_mark_ends_with_its_storage() -> None:
    kept = host.empty((8,), torch.float32, CPU)
    assert host.is_marked(kept[2:].untyped_storage())
    known = id(kept.untyped_storage())
    assert known in host._storages
    del kept
    gc.collect()
    assert known not in host._storages


def test_waiting_is_counted() -> None:
    traffic = host.Traffic()
    with traffic.waiting(CPU):
        pass
    assert traffic.waited_ms() > 0


@pytest.mark.parametrize("device", [torch.device("cuda")])
@needs_gpu[0]
@needs_gpu[1]
@needs_real_gpu
def test_on_a_card_it_is_pinned_and_waiting_is_the_streams(device: torch.device) -> None:
    assert host.empty((8,), torch.float32, device).is_pinned()
    traffic = host.Traffic()
    with traffic.waiting(device):
        torch.cuda._sleep(10_000_000)
    assert traffic.waited_ms() > 0.5


def test_memory_that_cannot_be_pinned_stays_pageable_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of pinned memory\nand more")

    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    host._say_pageable.cache_clear()
    with pytest.warns(UserWarning, match="stays pageable, so copies to it are slower: out of pinned memory"):
        assert not host.empty((8,), torch.float32, torch.device("cuda")).is_pinned()
