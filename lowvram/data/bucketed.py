"""loader=bucketed: batches of texts of like length, cut to the longest of each."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from typing import final

import numpy as np
import torch

from lowvram.config.errors import BadInput, require
from lowvram.core.ranks import num_ranks, rank
from lowvram.core.rig import Part
from lowvram.data.loader import Key, Loader, collate, made, reading_order, require_workers, slice_of
from lowvram.data.randomness import Stream, generator
from lowvram.data.source import Data, FollowedModel, Samples, Texts
from lowvram.data.spec import FEW_SHAPES, TEXTS, real_lengths

UNEVEN = "texts of uneven lengths, such as data=text or data=hub with data.samples=documents"


@final
@dataclass(frozen=True)
class Bucketed(Loader):
    """The samples of `pool_batches` batches, sorted by length and cut into batches, which come in a random order. Rows
    are as long as the longest text of their batch, rounded up to a `multiple`.

    Raises:
        BadInput: a value out of range.
    """

    pool_batches: int = 50
    multiple: int = 8
    num_workers: int = 0
    prefetch: int = 2

    def __post_init__(self) -> None:
        require(self.pool_batches >= 1, "loader.pool_batches", self.pool_batches, "at least 1")
        require(self.multiple >= 1, "loader.multiple", self.multiple, "at least 1 token")
        require_workers(self.num_workers, self.prefetch)

    def fit(self, data: Data, model: FollowedModel) -> Data:
        texts_of(data, "bucketed")
        num_shapes = -(-data.spec.shape[0] // self.multiple)
        return replace(data, spec=replace(data.spec, has_few_shapes=num_shapes <= FEW_SHAPES))

    def most_rows(self, samples: Samples, batch_size: int) -> int:
        return batch_size

    def batches(
        self, samples: Samples, batch_size: int, seed: int, first_step: int, device: torch.device
    ) -> Generator[Part, None, None]:
        assert isinstance(samples, Texts)
        keys = bucketed_keys(samples, batch_size, seed, first_step, self.pool_batches)
        return made(keys, partial(self.collate, samples), self.num_workers, self.prefetch, device)

    def collate(self, samples: Samples, keys: list[Key]) -> Part:
        return cut(collate(samples, keys), self.multiple)


def texts_of(data: Data, option: str) -> tuple[Texts, Texts]:
    """What is trained on and what is held out. Raises BadInput where that aren't texts of uneven lengths."""
    if data.spec.modality not in TEXTS:
        raise BadInput("loader", option, f"inline or workers for {data.spec.modality.value}, which have no lengths")
    if not (isinstance(data.train, Texts) and isinstance(data.eval, Texts)):
        allowed = f"inline or workers for samples that are all of one length: this is for {UNEVEN}"
        raise BadInput("loader", option, allowed)
    return data.train, data.eval


def bucketed_keys(
    samples: Texts, batch_size: int, seed: int, first_step: int, pool_batches: int
) -> Iterator[list[Key]]:
    """The samples of each batch from step `first_step` on, without end; of several ranks each gets its slice.

    No pool is larger than an epoch: samples would meet themselves again.
    """
    pool_batches = max(1, min(pool_batches, len(samples) // batch_size))
    first_pool, offset = divmod(first_step, pool_batches)
    keys = reading_order(len(samples), seed, first_pool * pool_batches * batch_size)
    for pool in count(first_pool):
        drawn = list(islice(keys, pool_batches * batch_size))
        order = np.argsort([samples.length(*key) for key in drawn], kind="stable").reshape(pool_batches, batch_size)
        for batch in generator(Stream.BUCKETS, seed, pool).permutation(order)[offset:]:
            yield slice_of([drawn[place] for place in batch], rank(), num_ranks())
        offset = 0


def cut(part: Part, multiple: int) -> Part:
    """Without the places, at the end of all rows, where every text is padding."""
    length = (part.inputs if torch.is_tensor(part.inputs) else next(iter(part.inputs.values()))).shape[1]
    longest = int(real_lengths(part.inputs, part.targets).max())
    kept = min(length, -(-longest // multiple) * multiple)
    return part.map(lambda each: each[:, :kept].contiguous() if each.shape[1:2] == (length,) else each)
