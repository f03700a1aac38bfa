"""The device that a plan is for, described so that this machine need not have it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from lowvram.core.device import Card, absent_from
from lowvram.core.fact import Fact


@final
@dataclass(frozen=True)
class Target:
    """`num_ranks` CUDA cards of one kind, or CPUs, with one rank each."""

    card: Card | None = None  # None: a CPU
    num_ranks: int = 1
    num_in_row: int = 1  # that split layers among them, and compute the same samples

    @property
    def num_data_ranks(self) -> int:
        """Among how many a logical batch is shared out."""
        return self.num_ranks // self.num_in_row

    def absent(self) -> dict[Fact, str]:
        """The facts that the device lacks, each with what the user can do about it. Assumes that compilers are
        installed."""
        return absent_from(self.card, self.num_ranks, "the CPU" if self.card is None else self.card.name)
