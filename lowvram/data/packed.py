"""loader=packed: several sequences in a row, whose attention and positions are kept apart."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import NamedTuple, final

import torch
from torch import Tensor

from lowvram.config.errors import BadInput
from lowvram.core.ranks import num_ranks, rank
from lowvram.core.rig import IGNORE, Part
from lowvram.data.bucketed import texts_of
from lowvram.data.loader import Key, Loader, made, reading_order, require_workers, slice_of
from lowvram.data.source import Data, FollowedModel, Samples, Texts
from lowvram.data.spec import IDS, POSITIONS, Layout, Modality, TensorLayout

WIDEST = 1.25  # the longest row, in lengths of the longest sequence that the data may have
FULL = 0.99  # of the places of a batch: good enough


@final
@dataclass(frozen=True)
class Packed(Loader):
    """The sequences of a batch in as few places as they need. A batch has as many sequences as ever.

    Raises:
        BadInput: a value out of range.
    """

    num_workers: int = 0
    prefetch: int = 2

    def __post_init__(self) -> None:
        require_workers(self.num_workers, self.prefetch)

    def fit(self, data: Data, model: FollowedModel) -> Data:
        texts_of(data, "packed")
        if data.spec.modality is not Modality.TOKENS:
            raise BadInput("loader", "packed", f"bucketed for {data.spec.modality.value}: each has a class of its own")
        model.check_packed()
        row = TensorLayout(data.spec.shape, "int64")
        layout = Layout(((IDS, row), (POSITIONS, row)), row)
        return replace(data, spec=replace(data.spec, layout=layout, has_few_shapes=False))

    def most_rows(self, samples: Samples, batch_size: int) -> int:
        assert isinstance(samples, Texts)
        return min(batch_size, -(-samples.longest(batch_size) // samples.room))

    def batches(
        self, samples: Samples, batch_size: int, seed: int, first_step: int, device: torch.device
    ) -> Generator[Part, None, None]:
        assert isinstance(samples, Texts)
        rows = packed_batches(samples, batch_size, seed, first_step)
        return made(rows, partial(laid_out, samples), self.num_workers, self.prefetch, device)

    def collate(self, samples: Samples, keys: list[Key]) -> Part:
        assert isinstance(samples, Texts)
        return laid_out(samples, packing(samples, keys, 1))


class Rows(NamedTuple):
    """Sequences, each with its number of tokens, in rows of one width."""

    rows: list[list[tuple[Key, int]]]
    width: int


def packed_batches(samples: Texts, batch_size: int, seed: int, first_step: int) -> Iterator[Rows]:
    """The rows of each batch from step `first_step` on, without end; of several ranks each gets as many."""
    keys = reading_order(len(samples), seed, first_step * batch_size)
    while True:
        rows, width = packing(samples, list(islice(keys, batch_size)), num_ranks())
        yield Rows(slice_of(rows, rank(), num_ranks()), width)


def packing(samples: Texts, keys: list[Key], unit: int) -> Rows:
    """These samples in rows whose number is a multiple of `unit`, as that of the samples is."""
    lengths = [samples.length(*key) for key in keys]
    rows = arranged(lengths, samples.room, unit)
    width = max(sum(lengths[each] for each in row) for row in rows)
    return Rows([[(keys[each], lengths[each]) for each in row] for row in rows], width)


def arranged(lengths: Sequence[int], room: int, unit: int) -> list[list[int]]:
    """Which sequences share a row, so that little is left over: in rows of about `room`, or somewhat wider ones where
    these leave less. Their number is a multiple of `unit`."""
    total = sum(lengths)
    usual, fewest = -(-total // room), -(-total // int(WIDEST * room))
    best, least_places = [[each] for each in range(len(lengths))], len(lengths) * max(lengths)
    for num_rows in range(-(-usual // unit) * unit, max(fewest, 1) - 1, -unit):
        rows, width = narrowest(lengths, num_rows)
        if num_rows * width < least_places:
            best, least_places = rows, num_rows * width
        if total >= FULL * least_places:
            break
    return best


def narrowest(lengths: Sequence[int], num_rows: int) -> tuple[list[list[int]], int]:
    """So many rows, and their width: the smallest in which best-fit decreasing finds room for all (Coffman, Garey and
    Johnson, 1978, "MULTIFIT")."""
    low = max(max(lengths), -(-sum(lengths) // num_rows))
    high = low + max(lengths)  # where a sequence doesn't fit in, rows are fuller than the mean: that can't be all
    found = best_fit(lengths, num_rows, high)
    while low < high:
        width = (low + high) // 2
        if rows := best_fit(lengths, num_rows, width):
            found, high = rows, width
        else:
            low = width + 1
    for row in found:
        if not row:
            row.append(max(found, key=len).pop())
    return found, high


def best_fit(lengths: Sequence[int], num_rows: int, width: int) -> list[list[int]]:
    """Each sequence, the longest first, in the fullest row that has room for it. None at all where one finds none."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    free = [(width, row) for row in range(num_rows)]  # tokens, the fewest first
    for each in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = bisect_left(free, (lengths[each], 0))
        if place == num_rows:
            return []
        left, row = free.pop(place)
        insort(free, (left - lengths[each], row))
        rows[row].append(each)
    return rows


def laid_out(samples: Texts, packed: Rows) -> Part:
    """Inputs {IDS, POSITIONS} and targets, each (rows, width). What is left of a row is a sequence that nobody sees."""
    shape = (len(packed.rows), packed.width)
    ids, targets = torch.zeros(shape, dtype=torch.long), torch.full(shape, IGNORE)
    places = torch.zeros(shape, dtype=torch.long)
    for number, row in enumerate(packed.rows):
        lengths = [length for _, length in row]
        sequences = [samples.sample(*key) for key, _ in row]
        fill(ids[number], [inputs[:length] for (inputs, _), length in zip(sequences, lengths, strict=True)])
        fill(targets[number], [wanted[:length] for (_, wanted), length in zip(sequences, lengths, strict=True)])
        rest = torch.arange(packed.width - sum(lengths)) % samples.room
        fill(places[number], [*map(torch.arange, lengths), rest])
    return Part({IDS: ids, POSITIONS: places}, targets)


def fill(row: Tensor, pieces: list[Tensor]) -> None:
    """The pieces side by side, from the start of the row on."""
    whole = torch.cat(pieces)
    row[: len(whole)] = whole
