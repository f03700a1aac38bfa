"""The memory of a step from its first event to its last: a ledger's lines, thinned to what a chart can show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, final

from lowvram.core.kind import Kind
from lowvram.core.peak import Peak, states
from lowvram.core.phases import BETWEEN, Marks

MOST_MOMENTS = 200


class Moment(NamedTuple):
    """What was alive after an event: the birth, resize or death of a storage."""

    event: int
    phase: str
    by_kind: Mapping[Kind, int]  # bytes


@final
@dataclass
class Timeline(Marks):
    """The memory over the step that a ledger records: make it at the step's beginning, tell it the phases, and ask it
    when the ledger has closed."""

    peak: Peak
    begins: list[tuple[int, str]] = field(default_factory=list)  # the number of lines before a phase, and its name

    def __post_init__(self) -> None:
        self.mark(BETWEEN)

    def mark(self, label: str) -> None:
        """From here on the events belong to the phase `label`."""
        self.begins.append((len(self.peak.lines), label))

    def moments(self, most: int = MOST_MOMENTS) -> list[Moment]:
        """The memory after some events: in each of `most` / 2 stretches of equally many events those after which the
        least and the most was alive, so that the peak is always among them; and after the last event."""
        start = self.begins[0][0]  # what was born before is what the step finds
        totals = [total for total, *_ in self._states()]
        size = max(1, -(-(len(totals) - start) // (most // 2)))
        stretches = [range(first, min(first + size, len(totals))) for first in range(start, len(totals), size)]
        kept = {choose(stretch, key=totals.__getitem__) for stretch in stretches for choose in (min, max)}
        kept.add(len(totals) - 1)
        live_after = ((event, live) for event, (_, _, live) in enumerate(self._states()))
        return [Moment(event - start, self._phase(event), dict(live)) for event, live in live_after if event in kept]

    def _states(self) -> Iterator[tuple[int, Kind, dict[Kind, int]]]:
        return states(self.peak.lines, self.peak.kinds)

    def _phase(self, event: int) -> str:
        return [label for line, label in self.begins if line <= event][-1]
