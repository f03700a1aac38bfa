"""The device that a plan is for: what it can do, told without asking it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from lowvram.core.device import Card, absent_from
from lowvram.core.knob import Fact


@final
@dataclass(frozen=True)
class Target:
    """So many CUDA cards of a kind, or CPUs, with one rank each."""

    card: Card | None = None  # None: a CPU
    num_ranks: int = 1

    def absent(self) -> dict[Fact, str]:
        """The facts that it lacks. Compilers are taken to be installed there."""
        return absent_from(self.card, self.num_ranks, "the CPU" if self.card is None else self.card.name)
