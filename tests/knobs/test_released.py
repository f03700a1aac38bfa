"""Messages that hold nothing when they have arrived."""

from __future__ import annotations

import time
from threading import Timer

import pytest
import torch
import torch.distributed as dist

from lowvram.compat.torch_distributed import all_gather, reduce_scatter
from lowvram.compat.torch_fake import FakeTensorMode
from lowvram.compat.torch_storage import num_holders
from lowvram.knobs.sharding import released as module
from lowvram.knobs.sharding.released import released
from tests.ranks import on_ranks

HOLDERS = 3  # the variable, its tensor, and who asks for the tensor's storage


def holders_after_exchanges(times: int) -> set[int]:
    """How many hold what was sent and what has arrived, as soon as ranks have exchanged their halves."""
    sent, received, seen = torch.zeros(16), torch.zeros(16), set[int]()
    for _ in range(times):
        with released(sent, received):
            dist.all_to_all_single(received, sent)
        seen |= {num_holders(each) for each in (sent, received)}
    return seen


def holders_after_messages(times: int) -> set[int]:
    """How many hold what was sent and what has arrived, as soon as it has."""
    part, whole, seen, group = torch.zeros(8), torch.zeros(16), set[int](), dist.group.WORLD
    assert group is not None
    for _ in range(times):
        with released(part, whole):
            all_gather(whole, part, group)
        seen |= {num_holders(each) for each in (part, whole)}
        with released(part, whole):
            reduce_scatter(part, whole, group).wait()
        seen |= {num_holders(each) for each in (part, whole)}
    return seen


@pytest.mark.medium
def test_nothing_lives_on_that_a_message_held_for_a_moment() -> None:
    """Left to itself gloo holds one of five a moment too long."""
    for seen in on_ranks(holders_after_messages, 50):
        assert seen == {HOLDERS}


@pytest.mark.medium
def test_a_message_of_whole_tensors_is_released_too() -> None:
    """Gloo then holds the tensors themselves, and their storages' counts stay as they are."""
    for seen in on_ranks(holders_after_exchanges, 200):
        assert seen == {HOLDERS}


@pytest.mark.parametrize("kind", ["a view", "its graph"])
def test_it_waits_for_who_lets_go(kind: str) -> None:
    x = torch.zeros(4)
    weight = torch.ones(4, requires_grad=True)
    kept = []
    with released(x):
        kept.append(x.view(2, 2) if kind == "a view" else weight * x)  # which saves x itself for its backward pass
        timer = Timer(0.05, kept.clear)
        timer.start()
    assert not kept
    timer.join()


def test_it_does_not_wait_for_who_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_HOLD_S", 0.01)
    x = torch.zeros(4)
    began = time.monotonic()
    with released(x):
        kept = x.view(2, 2)
    assert time.monotonic() - began >= 0.01
    del kept


def test_on_paper_nobody_is_asked() -> None:
    with FakeTensorMode(), released(torch.zeros(4)):
        pass
