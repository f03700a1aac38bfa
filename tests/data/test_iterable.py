"""Iterable data sets: read in their own order, the same after going back, with one worker at most."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lowvram.config.errors import BadInput
from lowvram.data.batch_sizes import SameSize
from lowvram.data.bucketed import Bucketed
from lowvram.data.iterable import Iterated
from lowvram.data.loader import Inline, Loader, Workers
from lowvram.data.randomness import Stream
from tests import yours
from tests.data.test_external import CPU, made_by


def drawn(loader: Loader, first_step: int = 0, num_batches: int = 4) -> list[torch.Tensor]:
    data = made_by(yours.endless, eval_samples=3)
    batches = loader.batches(data.train, SameSize(2), 0, first_step, CPU)
    try:
        return [torch.cat([next(batches).inputs, next(batches).targets], 1) for _ in range(num_batches)]
    finally:
        batches.close()


def test_samples_come_in_their_order_also_after_resuming_and_from_a_worker() -> None:
    found = drawn(Inline())
    assert torch.cat(found)[:, 0].tolist() == [0, 1, 4, 5, 1, 2, 5, 6]
    resumed = drawn(Inline(), first_step=4, num_batches=2)
    assert torch.equal(torch.stack(found[2:]), torch.stack(resumed))
    assert torch.equal(torch.stack(found), torch.stack(drawn(Workers(num_workers=1))))


def test_several_workers_and_other_orders_are_refused() -> None:
    data = made_by(yours.endless, eval_samples=3)
    with pytest.raises(
        BadInput, match=r"loader\.num_workers=2: must be at most 1 for a data set that can only be read in"
    ):
        Workers(num_workers=2).fit(data, None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(BadInput, match=r"loader='bucketed': must be inline"):
        Bucketed().fit(data, None)  # pyright: ignore[reportArgumentType]


def test_each_epoch_has_the_order_that_the_data_set_gives_it() -> None:
    samples = Iterated(yours.Shuffled(), Stream.TRAIN, 0)
    epochs = [[int(samples[index][0]) for index in range(first, first + 7)] for first in (0, 7, 0)]
    assert epochs[0] == epochs[2] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(7))


def test_an_order_drawn_when_reading_begins_is_a_function_of_the_seed() -> None:
    readers = [Iterated(yours.Drawn(), Stream.TRAIN, seed) for seed in (0, 0, 1)]
    first, again, other = ([int(samples[index][0]) for index in range(7)] for samples in readers)
    assert first == again != other


def test_what_is_held_out_is_kept() -> None:
    data = made_by(yours.endless, eval_samples=3)
    assert len(data.eval) == 3
    assert torch.equal(data.eval.sample(2, 0)[1], data.eval.sample(2, 0)[1])
    assert "samples of unknown number to train on, 3 held out" in data.description


@pytest.mark.parametrize(
    ("train", "said"),
    [
        (DataLoader(TensorDataset(torch.zeros(3))), "returned a DataLoader; batches are made by lowvram"),
        (iter([1, 2]), "returned a list_iterator, which can be read only once"),
        ({1.0}, r"number 0 of the samples to train on is a float: a sample must be a pair"),
        (set[Any](), "returned an empty set"),
    ],
    ids=["loader", "iterator", "no pairs", "empty"],
)
def test_what_cannot_be_used_is_refused(train: Any, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        made_by(lambda: (train, [(1.0, 2.0)]))


def test_how_many_are_held_out_must_be_known() -> None:
    with pytest.raises(BadInput, match=r"data\.eval_samples=null: must be how many held-out samples are read"):
        made_by(yours.endless)


def test_a_number_of_classes_must_be_given() -> None:
    with pytest.raises(
        BadInput, match=r"data\.num_classes=null: must be given: the data set can only be read in its own"
    ):
        made_by(partial(tuple, [iter_of_classes(), [(1.0, 2)]]))
    assert made_by(partial(tuple, [iter_of_classes(), [(1.0, 2)]]), num_classes=3).spec.num_classes == 3


def iter_of_classes() -> Any:
    return {"a": (1.0, 1)}.values()
