"""A trial's number, what is drawn for it, and what it tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from random import Random

from tests.faults.scenarios import Scenario


@dataclass(frozen=True)
class Draw:
    """Of one trial: the same number and seed draw the same."""

    kind: str
    number: int
    seed: int
    only: tuple[str, ...] = ()  # of the scenarios; none: all

    @cached_property
    def random(self) -> Random:
        return Random(f"{self.seed} {self.kind} {self.number}")

    def among(self, scenarios: Sequence[Scenario]) -> list[Scenario]:
        """Those that are wanted."""
        return [scenario for scenario in scenarios if not self.only or scenario.name in self.only]

    def in_turn(self, number: int, most: int) -> int:
        """From 1 to `most`, each once before any comes again, in an order that the seed shuffles."""
        numbers = list(range(1, most + 1))
        Random(f"{self.seed} {self.kind} {number // most}").shuffle(numbers)
        return numbers[number % most]


@dataclass
class Told:
    """Of one trial."""

    about: str  # what was done, in words
    problems: list[str] = field(default_factory=list)
