"""accum: splits the logical batch into parts that are computed one after another, with one update at the end: less
memory, the same gradients (up to rounding).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from torch import Tensor, nn

from lowvram.compat.torch_modules import BatchNorm
from lowvram.config.errors import require
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob, Neutral, Stage
from lowvram.core.mesh import data_ranks
from lowvram.core.rig import Part, Rig
from lowvram.core.slices import begin_of, most_in_slice, num_in_batch


@dataclass(frozen=True)
class Whole(Neutral):
    """The logical batch in one piece."""

    parts: int = 1

    stage = Stage.BATCH

    def __post_init__(self) -> None:
        require(
            self.parts == 1,
            "accum.parts",
            self.parts,
            "1 with accum=none: choose accum=x2 (or x4 … x32) to split the batch",
        )

    def reference(self) -> Growing:
        return Growing()


@dataclass(frozen=True)
class Parts(Knob):
    """The logical batch in `parts` parts of (nearly) equal size."""

    parts: int = 2

    stage = Stage.BATCH
    band = 2e-6
    saves = Kind.ACTIVATIONS

    def __post_init__(self) -> None:
        require(self.parts >= 1, "accum.parts", self.parts, "at least 1")

    def caveat(self, model: nn.Module) -> str | None:
        if self.parts == 1 or not any(isinstance(module, BatchNorm) for module in model.modules()):
            return None
        each = f"each of the {self.parts} parts"
        return f"BatchNorm normalises over {each}, not over the whole batch (model.norm=group doesn't)"

    def reference(self) -> Growing:
        return Growing()

    def num_parts(self) -> int:
        return self.parts

    def apply(self, rig: Rig) -> Rig:
        def split(batch: Part) -> list[Part]:
            parts = self.split(batch)
            if len(parts) > 1:
                rig.task.in_parts(len(parts))
            return parts

        return replace(rig, split=split)

    def remedies(self) -> Mapping[Kind, int]:
        """Up to 8 parts, more are offered first; more than 8 take time, and are offered after everything else."""
        turn = 28 - self.parts if self.parts <= 8 else 50 + self.parts
        return dict.fromkeys((Kind.ACTIVATIONS, Kind.INPUTS, Kind.OTHER), turn)

    def improves_on(self, in_use: Knob) -> bool:
        """Never on `Growing`, which finds the number of parts by itself."""
        return type(in_use) in (Whole, Parts) and vars(in_use)["parts"] < self.parts

    def split(self, batch: Part) -> list[Part]:
        """The parts, along the first dimension; fewer than `parts` if the batch has fewer samples."""
        num_parts = min(self.parts, batch.num_samples)
        if num_parts <= 1:
            return [batch]
        bounds = [begin_of(batch.num_samples, at, num_parts) for at in range(num_parts + 1)]
        pairs = pairwise(bounds)
        return [batch.map(partial(rows, begin=begin, end=end, num_samples=batch.num_samples)) for begin, end in pairs]


def rows(tensor: Tensor, begin: int, end: int, num_samples: int) -> Tensor:
    """The rows of a part of the samples; the whole tensor if it is the same for all of them.

    Raises:
        BadInput: it has rows, and not as many for each sample.
    """
    if tensor.dim() == 0 or len(tensor) == 1:
        return tensor
    each, more = divmod(len(tensor), num_samples)
    allowed = f"tensors with a row for each of the {num_samples} samples, or with one for all, to be split by accum"
    require(each > 0 and not more, "batch", f"a tensor of shape {tuple(tensor.shape)}", allowed)
    return tensor[each * begin : each * end]


def in_parts_of_largest(batch_size: int, num_parts: int) -> Callable[[Part], list[Part]]:
    """A `Rig.split` for batches of several sizes: into as few parts as are no larger than those of the largest one. All
    ranks get equally many.

    Args:
        batch_size: of the largest one, over all ranks, which each splits into `num_parts`.
    """
    num_ranks = data_ranks().size
    num_samples = most_in_slice(batch_size, num_ranks) // num_parts  # of the smallest part

    def split(batch: Part) -> list[Part]:
        num_all = num_in_batch([batch])
        num_needed = most_in_slice(most_in_slice(num_all, num_ranks), num_samples)
        return Parts(min(num_parts, num_needed, num_all // num_ranks)).split(batch)

    return split


@dataclass(frozen=True)
class Growing(Parts):
    """As many parts as memory requires: a point that runs out of memory starts again in a fresh process, with more."""

    parts: int = 1

    saves = None  # it starts with one part

    def remedies(self) -> Mapping[Kind, int]:
        return {}

    def more_parts(self, num_samples: int) -> int | None:
        """The next number of parts to try: at least twice as many, and a divisor of the number of samples of a rank;
        None if there is none."""
        return next((parts for parts in range(2 * self.parts, num_samples + 1) if num_samples % parts == 0), None)
