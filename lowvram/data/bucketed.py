"""loader=bucketed: batches of texts of similar length, each batch trimmed to its longest text."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from math import prod
from typing import final

import numpy as np
import torch

from lowvram.config.errors import BadInput, require
from lowvram.core.rig import Part
from lowvram.data.batch_sizes import BatchSizes
from lowvram.data.loader import Loader, collate, make_batches, own_slice, part_of, require_workers
from lowvram.data.randomness import Key, Stream, generator
from lowvram.data.source import Data, FollowedModel, Samples, Texts
from lowvram.data.spec import DECODER_IDS, FEW_SHAPES, TEXTS, Modality, real_lengths

UNEVEN = "texts of uneven lengths, such as data=text or data=hub with data.samples=documents"


@final
@dataclass(frozen=True)
class Bucketed(Loader):
    """Draws the samples of `pool_batches` batches, sorts them by length, cuts them into batches and shuffles these.
    The rows of a batch are as long as its longest text, rounded up to a multiple of `multiple`.

    Raises:
        BadInput: a value out of range.
    """

    pool_batches: int = 50
    multiple: int = 8
    num_workers: int = 0
    prefetch: int = 2

    takes_any_sizes = False  # a pool is cut into batches of one size

    def __post_init__(self) -> None:
        require(self.pool_batches >= 1, "loader.pool_batches", self.pool_batches, "at least 1")
        require(self.multiple >= 1, "loader.multiple", self.multiple, "at least 1 token")
        require_workers(self.num_workers, self.prefetch)

    def fit(self, data: Data, model: FollowedModel) -> Data:
        texts_of(data, "bucketed")
        lengths = data.spec.shape
        if data.spec.modality is Modality.PAIRS and data.spec.layout is not None:
            lengths += data.spec.layout.targets.shape
        num_shapes = prod(-(-length // self.multiple) for length in lengths)
        return replace(data, spec=replace(data.spec, has_few_shapes=num_shapes <= FEW_SHAPES))

    def most_rows(self, samples: Samples, batch_size: int) -> int:
        return batch_size

    def batches(
        self, samples: Samples, sizes: BatchSizes, seed: int, first_step: int, device: torch.device
    ) -> Generator[Part, None, None]:
        assert isinstance(samples, Texts)
        slices = map(own_slice, bucketed_keys(samples, sizes.largest, seed, first_step, self.pool_batches))
        make = partial(part_of, partial(self.collate, samples))
        return make_batches(slices, make, self.num_workers, self.prefetch, device)

    def collate(self, samples: Samples, keys: list[Key]) -> Part:
        return trim_padding(collate(samples, keys), self.multiple)


def texts_of(data: Data, option: str) -> tuple[Texts, Texts]:
    """The samples to train on and those held out. Raises BadInput unless both are texts of uneven lengths."""
    if data.spec.modality not in TEXTS:
        raise BadInput("loader", option, f"inline or workers for {data.spec.modality.value}, which have no lengths")
    if data.train.is_ordered:
        raise BadInput("loader", option, "inline for a data set that can only be read in its own order")
    if not (isinstance(data.train, Texts) and isinstance(data.eval, Texts)):
        allowed = f"inline or workers for samples that are all of one length: {option} is for {UNEVEN}"
        raise BadInput("loader", option, allowed)
    return data.train, data.eval


def bucketed_keys(
    samples: Texts, batch_size: int, seed: int, first_step: int, pool_batches: int
) -> Iterator[list[Key]]:
    """The keys of each logical batch from step `first_step` on, without end.

    A pool is never larger than an epoch, so no sample is in it twice.
    """
    pool_batches = max(1, min(pool_batches, len(samples) // batch_size))
    first_pool, offset = divmod(first_step, pool_batches)
    keys = samples.keys(seed, first_pool * pool_batches * batch_size)
    for pool in count(first_pool):
        drawn = list(islice(keys, pool_batches * batch_size))
        order = np.argsort([samples.length(*key) for key in drawn], kind="stable").reshape(pool_batches, batch_size)
        for batch in generator(Stream.BUCKETS, seed, pool).permutation(order)[offset:]:
            yield [drawn[place] for place in batch]
        offset = 0


def trim_padding(part: Part, multiple: int) -> Part:
    """The batch without the last columns, where all rows hold padding only; of pairs each text by itself."""
    if isinstance(part.inputs, dict) and DECODER_IDS in part.inputs:
        source = {name: tensor for name, tensor in part.inputs.items() if name != DECODER_IDS}
        read = trim_padding(Part(source, part.targets[:, 0]), multiple)
        written = trim_padding(Part(part.inputs[DECODER_IDS], part.targets, part.soft), multiple)
        return replace(written, inputs={**read.inputs, DECODER_IDS: written.inputs})
    length = (part.inputs if torch.is_tensor(part.inputs) else next(iter(part.inputs.values()))).shape[1]
    longest = int(real_lengths(part.inputs, part.targets).max())
    kept = min(length, -(-longest // multiple) * multiple)
    return part.map(lambda tensor: tensor[:, :kept].contiguous() if tensor.shape[1:2] == (length,) else tensor)
