"""The device that a plan is for, described so that this machine need not have it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

from lowvram.core.device import Card, absent_from
from lowvram.core.fact import Fact
from lowvram.core.row_shape import ALONE, RowShape


@final
@dataclass(frozen=True)
class Target:
    """`num_ranks` CUDA cards of one kind, or CPUs, with one rank each."""

    card: Card | None = None  # None: a CPU
    num_ranks: int = 1
    row: RowShape = ALONE
    rank: int = 0  # whose tensors are followed
    zero_grad: str | None = None  # where a plain loop zeroes gradients (trace/plain_loop.py); None: lowvram's own loop

    @property
    def num_data_ranks(self) -> int:
        """Among how many a logical batch is shared out."""
        return self.row.num_rows(self.num_ranks)

    def stages(self) -> list[Target]:
        """The same for one rank of each stage of a pipeline, in order; without one, itself."""
        apart = self.num_ranks // self.row.pipeline
        return [replace(self, rank=stage * apart) for stage in range(self.row.pipeline)]

    def absent(self) -> dict[Fact, str]:
        """The facts that the device lacks, each with what the user can do about it. Assumes that compilers are
        installed."""
        return absent_from(self.card, self.num_ranks, "the CPU" if self.card is None else self.card.name)
