from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lowvram.core.mesh import Ranks
from lowvram.core.rig import Part
from lowvram.data.batch_sizes import SameSize
from lowvram.data.glyphs import Glyphs
from lowvram.data.loader import Inline, Loader, TimedBatches, Workers, batch_keys, eval_batches, stacked
from lowvram.data.source import Samples

# torch's advice on a machine of one core; two workers are right there too.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

CPU = torch.device("cpu")


class Numbers(Samples):
    """Sample i of epoch e is the number 100 e + i."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def sample(self, index: int, epoch: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([100.0 * epoch + index]), torch.tensor(index)


class Broken(Numbers):
    """Can't be read."""

    def sample(self, index: int, epoch: int) -> tuple[Tensor, Tensor]:
        raise RuntimeError("the image red/0.png can't be decoded")


def first_batches(
    loader: Loader, samples: Samples, number: int, first_step: int = 0, seed: int = 0, batch_size: int = 4
) -> list[Part]:
    batches = loader.batches(samples, SameSize(batch_size), seed, first_step, CPU)
    parts = list(itertools.islice(batches, number))
    batches.close()
    return parts


def assert_same(left: list[Part], right: list[Part]) -> None:
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.targets, other.targets)


LOADERS = [Inline(), Workers(num_workers=1, prefetch=1), Workers(num_workers=2)]


@pytest.mark.parametrize("loader", LOADERS, ids=repr)
@pytest.mark.parametrize("first_step", [0, 1, 2, 7, 25])
def test_resuming_at_any_step_gives_the_same_batches(loader: Loader, first_step: int) -> None:
    whole = first_batches(Inline(), Numbers(10), first_step + 5)
    assert_same(first_batches(loader, Numbers(10), 5, first_step), whole[first_step:])


def test_workers_give_what_inline_gives() -> None:
    samples = Glyphs(image_size=8, num_samples=50).open(seed=3).train
    assert_same(first_batches(Workers(2), samples, 6), first_batches(Inline(), samples, 6))


def test_an_epoch_shows_every_sample_once_and_its_tail_goes_on() -> None:
    parts = first_batches(Inline(), Numbers(10), 5)
    assert all(part.num_samples == 4 for part in parts)
    numbers = torch.cat([part.inputs.flatten() for part in parts]).tolist()
    assert sorted(numbers) == [*range(10), *range(100, 110)]


def test_a_batch_may_be_larger_than_the_data() -> None:
    (part,) = first_batches(Inline(), Numbers(3), 1, batch_size=8)
    assert sorted(Counter(part.targets.tolist()).values()) == [2, 3, 3]
    assert set(part.inputs.flatten().tolist()) > {0.0, 1.0, 2.0, 100.0, 101.0, 102.0}


def test_the_order_follows_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        (keys,) = itertools.islice(batch_keys(Numbers(50), SameSize(50), seed, first_step=epoch), 1)
        assert {key[1] for key in keys} == {epoch}
        return [index for index, _ in keys]

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    assert order(0, 0) != list(range(50))


def test_starting_draws_no_global_random_number() -> None:
    """Else dropout would differ between loaders."""
    for loader in LOADERS:
        before = torch.get_rng_state()
        first_batches(loader, Numbers(10), 2)
        assert torch.equal(torch.get_rng_state(), before)


def children() -> set[int]:
    """All processes whose parent is this one."""
    found: set[int] = set()
    for task in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        with suppress(FileNotFoundError):  # a thread that has just ended
            found |= {int(child) for child in task.read_text().split()}
    return found


@pytest.mark.parametrize("number", [1, 4])
def test_closing_leaves_no_process_behind(number: int) -> None:
    before = children()
    batches = Workers(num_workers=2).batches(Numbers(10), SameSize(4), 0, 0, CPU)
    for _ in range(number):
        next(batches)
    assert len(children() - before) == 2
    batches.close()
    assert children() == before
    assert not multiprocessing.active_children()


def test_ctrl_c_is_left_to_the_parent() -> None:
    before = children()
    batches = Workers(num_workers=2).batches(Numbers(10), SameSize(4), 0, 0, CPU)
    parts = [next(batches)]
    for worker in children() - before:
        os.kill(worker, signal.SIGINT)
    parts += itertools.islice(batches, 7)
    batches.close()
    assert_same(parts, first_batches(Inline(), Numbers(10), 8))


def test_a_worker_hands_its_error_on_and_ends() -> None:
    before = children()
    with pytest.raises(RuntimeError, match=r"red/0\.png can't be decoded"):
        first_batches(Workers(num_workers=2), Broken(10), 1)
    assert children() == before


def test_tensors_by_name_are_batched_by_name() -> None:
    pair = {"a": torch.tensor([1, 2]), "b": torch.tensor(3)}
    found = stacked([pair, {"a": torch.tensor([4, 5]), "b": torch.tensor(6)}])
    assert isinstance(found, dict)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {"a": [[1, 2], [4, 5]], "b": [3, 6]}


def test_evaluation_reads_every_sample_once_in_order() -> None:
    parts, counts = zip(*eval_batches(Numbers(10), 4, CPU), strict=True)
    assert all(counts)
    assert [part.num_samples for part in parts] == [4, 4, 2]
    assert torch.cat([part.inputs.flatten() for part in parts]).tolist() == list(range(10))


def test_waiting_is_counted_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()  # each look at the clock is a second
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    waited = TimedBatches(Inline().batches(Numbers(10), SameSize(4), 0, 0, CPU))
    for _ in range(2):
        next(waited)
        time.perf_counter()
    assert waited.waits_s == [1, 1]
    waited.close()
    assert list(waited) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_batches_for_a_card_are_pinned() -> None:
    device = torch.device("cuda")
    samples = Glyphs(image_size=32).open(seed=0).train
    expected = first_batches(Inline(), samples, 20)
    for loader in (Inline(), Workers(2)):
        batches = loader.batches(samples, SameSize(4), 0, 0, device)
        parts = list(itertools.islice(batches, 20))
        batches.close()
        assert all(part.inputs.is_pinned() and part.targets.is_pinned() for part in parts)
        assert_same(parts, expected)


# Several ranks


@pytest.mark.parametrize("loader", LOADERS, ids=repr)
def test_the_slices_of_all_ranks_make_the_batch(loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = first_batches(loader, Numbers(10), 4, first_step=3)
    monkeypatch.setattr(Ranks, "size", 3)
    slices = []
    for each in range(3):
        monkeypatch.setattr(Ranks, "rank", each)
        slices.append(first_batches(loader, Numbers(10), 4, first_step=3))
    batches = list(zip(*slices, strict=True))
    assert [part.num_samples for part in batches[0]] == [2, 1, 1]
    assert {part.num_in_batch for parts in batches for part in parts} == {4}
    assert {part.num_in_batch for part in whole} == {None}
    assert_same([joined(parts) for parts in batches], whole)


def joined(parts: tuple[Part, ...]) -> Part:
    return Part(torch.cat([part.inputs for part in parts]), torch.cat([part.targets for part in parts]))


@pytest.mark.parametrize("num_samples", [10, 8, 3, 1])
def test_ranks_share_what_is_held_out(num_samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sample's target counts once, and all ranks compute as many batches."""
    monkeypatch.setattr(Ranks, "size", 2)
    shares = []
    for each in range(2):
        monkeypatch.setattr(Ranks, "rank", each)
        shares.append(list(eval_batches(Numbers(num_samples), 2, CPU)))
    assert len(shares[0]) == len(shares[1])
    counted = [target for share in shares for part, counts in share if counts for target in part.targets.tolist()]
    assert sorted(counted) == list(range(num_samples))
