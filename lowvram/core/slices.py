"""Which samples of a logical batch are whose: of the ranks, or of the parts of a rank. As torch's tensor_split cuts: in
order, as many to each as possible, and one more to the first ones, so that no rank has more than the first."""

from __future__ import annotations

from collections.abc import Sequence

from lowvram.core.mesh import data_ranks
from lowvram.core.rig import Part


def begin_of(num_samples: int, index: int, num_slices: int) -> int:
    """The first sample of one of `num_slices` slices; of index `num_slices`, the number of samples."""
    size, num_larger = divmod(num_samples, num_slices)
    return index * size + min(index, num_larger)


def most_in_slice(num_samples: int, num_slices: int) -> int:
    """How many samples the first slice has, and no other has more."""
    return -(-num_samples // num_slices)


def num_in_batch(parts: Sequence[Part]) -> int:
    """How many samples all data ranks have together in a step, of which this rank has these parts."""
    known = parts[0].num_in_batch
    return data_ranks().size * sum(part.num_samples for part in parts) if known is None else known


def begin_in_batch(parts: Sequence[Part]) -> int:
    """How many samples of a step belong to the data ranks before this one, which has these parts."""
    return begin_of(num_in_batch(parts), data_ranks().rank, data_ranks().size)


def weight_among_ranks(parts: Sequence[Part]) -> float | None:
    """How many samples this rank has in a step, relative to the mean over the data ranks; None if all have equally
    many. None on all ranks or on none."""
    known = parts[0].num_in_batch
    return None if known is None else sum(part.num_samples for part in parts) * data_ranks().size / known
