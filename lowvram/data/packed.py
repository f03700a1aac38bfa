"""loader=packed: several sequences per row; attention stays inside each, and each counts positions from 0."""

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
from lowvram.core.mesh import data_ranks
from lowvram.core.rig import IGNORE, Part
from lowvram.data.batch_sizes import BatchSizes
from lowvram.data.bucketed import texts_of
from lowvram.data.loader import Loader, make_batches, own_slice, require_workers
from lowvram.data.randomness import Key
from lowvram.data.source import Data, FollowedModel, Samples, Texts
from lowvram.data.spec import IDS, POSITIONS, Layout, Modality, TensorLayout

WHY_NOT = {Modality.LABELLED_TOKENS: "a row has one class, so it can't hold several texts"}
OTHERWISE = "rows hold several texts only where each token is predicted from those before it"
WIDEST = 1.25  # the widest row allowed, as a multiple of `padded_length`
FULL = 0.99  # share of a batch that is no padding: the search for a better packing ends


@final
@dataclass(frozen=True)
class Packed(Loader):
    """Packs the sequences of a batch into fewer rows. A batch has as many sequences as with other loaders.

    Raises:
        BadInput: a value out of range.
    """

    num_workers: int = 0
    prefetch: int = 2

    takes_any_sizes = False  # parts of one number of rows would hold other numbers of samples

    def __post_init__(self) -> None:
        require_workers(self.num_workers, self.prefetch)

    def fit(self, data: Data, model: FollowedModel) -> Data:
        texts_of(data, "packed")
        if data.spec.modality is not Modality.TOKENS:
            raise BadInput(
                "loader",
                "packed",
                f"bucketed for {data.spec.modality.value}: {WHY_NOT.get(data.spec.modality, OTHERWISE)}",
            )
        model.check_packed()
        row = TensorLayout(data.spec.shape, "int64")
        layout = Layout(((IDS, row), (POSITIONS, row)), row)
        return replace(data, spec=replace(data.spec, layout=layout, has_few_shapes=False))

    def most_rows(self, samples: Samples, batch_size: int) -> int:
        assert isinstance(samples, Texts)
        return min(batch_size, -(-samples.longest(batch_size) // samples.padded_length))

    def batches(
        self, samples: Samples, sizes: BatchSizes, seed: int, first_step: int, device: torch.device
    ) -> Generator[Part, None, None]:
        assert isinstance(samples, Texts)
        rows = packed_batches(samples, sizes.largest, seed, first_step)
        return make_batches(rows, partial(to_part, samples), self.num_workers, self.prefetch, device)

    def collate(self, samples: Samples, keys: list[Key]) -> Part:
        assert isinstance(samples, Texts)
        return to_part(samples, pack(samples, keys, 1))


class PackedRows(NamedTuple):
    """Keys of sequences, each with its number of tokens, in rows of one width in tokens; and how many rows all ranks
    have together, if they have different numbers."""

    rows: list[list[tuple[Key, int]]]
    width: int
    num_in_batch: int | None = None


def packed_batches(samples: Texts, batch_size: int, seed: int, first_step: int) -> Iterator[PackedRows]:
    """This rank's rows of each batch from step `first_step` on, without end. All ranks have equally many, unless each
    sequence has a row of its own: then ranks differ as they do with other loaders."""
    keys = samples.keys(seed, first_step * batch_size)
    while True:
        packed = pack(samples, list(islice(keys, batch_size)), data_ranks().size)
        own = own_slice(packed.rows)
        yield PackedRows(own.items, packed.width, own.num_in_batch)


def pack(samples: Texts, keys: list[Key], unit: int) -> PackedRows:
    """Packs these samples, at least `unit`. The number of rows is a multiple of `unit`, or that of the samples."""
    lengths = [samples.length(*key) for key in keys]
    rows = assign_rows(lengths, samples.padded_length, unit)
    width = max(sum(lengths[i] for i in row) for row in rows)
    return PackedRows([[(keys[i], lengths[i]) for i in row] for row in rows], width)


def assign_rows(lengths: Sequence[int], padded_length: int, unit: int) -> list[list[int]]:
    """The indices of the sequences of each row, for little padding. Rows are about `padded_length` wide, or up to
    `WIDEST` times as wide where that leaves less padding. Their number is a multiple of `unit`, or that of the
    sequences."""
    total = sum(lengths)
    usual, fewest = -(-total // padded_length), -(-total // int(WIDEST * padded_length))
    best, least_places = [[i] for i in range(len(lengths))], len(lengths) * max(lengths)
    most = len(lengths) // unit * unit  # more rows than sequences would leave some empty
    for num_rows in range(min(-(-usual // unit) * unit, most), max(fewest, 1) - 1, -unit):
        rows, width = narrowest(lengths, num_rows)
        if num_rows * width < least_places:
            best, least_places = rows, num_rows * width
        if total >= FULL * least_places:
            break
    return best


def narrowest(lengths: Sequence[int], num_rows: int) -> tuple[list[list[int]], int]:
    """Packs all sequences into `num_rows` rows of the smallest width for which best-fit decreasing succeeds, with
    their width (Coffman, Garey and Johnson, 1978, "MULTIFIT"). No row is empty."""
    low = max(max(lengths), -(-sum(lengths) // num_rows))
    high = low + max(lengths)  # always enough: the emptiest row is not fuller than the mean
    best = best_fit(lengths, num_rows, high)
    while low < high:
        width = (low + high) // 2
        if rows := best_fit(lengths, num_rows, width):
            best, high = rows, width
        else:
            low = width + 1
    for row in best:
        if not row:
            row.append(max(best, key=len).pop())
    return best, high


def best_fit(lengths: Sequence[int], num_rows: int, width: int) -> list[list[int]]:
    """Puts each sequence, the longest first, into the fullest row that has room for it. Returns no rows if one fits
    nowhere."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    free = [(width, row) for row in range(num_rows)]  # free tokens of each row, the fewest first
    for i in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = bisect_left(free, (lengths[i], 0))
        if place == num_rows:
            return []
        left, row = free.pop(place)
        insort(free, (left - lengths[i], row))
        rows[row].append(i)
    return rows


def to_part(samples: Texts, packed: PackedRows) -> Part:
    """Inputs {IDS, POSITIONS} and targets, each (rows, width) int64. The padding at the end of a row forms sequences of
    its own, which no other sequence attends to."""
    shape = (len(packed.rows), packed.width)
    ids, targets = torch.zeros(shape, dtype=torch.long), torch.full(shape, IGNORE)
    positions = torch.zeros(shape, dtype=torch.long)
    for number, row in enumerate(packed.rows):
        lengths = [length for _, length in row]
        sequences = [samples.sample(*key) for key, _ in row]
        fill(ids[number], [inputs[:length] for (inputs, _), length in zip(sequences, lengths, strict=True)])
        fill(targets[number], [wanted[:length] for (_, wanted), length in zip(sequences, lengths, strict=True)])
        rest = torch.arange(packed.width - sum(lengths)) % samples.padded_length
        fill(positions[number], [*map(torch.arange, lengths), rest])
    return Part({IDS: ids, POSITIONS: positions}, targets, num_in_batch=packed.num_in_batch)


def fill(row: Tensor, pieces: list[Tensor]) -> None:
    """The pieces side by side, from the start of the row on."""
    whole = torch.cat(pieces)
    row[: len(whole)] = whole
