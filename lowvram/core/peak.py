"""The peak of live bytes, computed from a ledger's lines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

from lowvram.core.kind import Kind

ROUND_BYTES = 512  # the CUDA caching allocator's
Change = tuple[int, int]  # serial number of a storage, and its bytes from now on: 0 at its death


class Holding(NamedTuple):
    """A storage that was alive at the peak."""

    num_bytes: int
    kind: Kind
    origin: Any  # what `origin_of` returned at its allocation; None if it wasn't called


@final
@dataclass
class Peak:
    """What a ledger has counted, in bytes; filled when it closes.

    `lines` and `kinds` are the ledger's record: of each birth, resize and death of a storage, and by serial number. In
    which order storages die together isn't the same in every run, so two peaks don't compare them.
    """

    lines: Sequence[Change] = field(default=(), repr=False, compare=False)
    kinds: Mapping[int, Kind] = field(default_factory=dict, repr=False, compare=False)
    peak_bytes: int = 0
    by_kind: dict[Kind, int] = field(default_factory=dict)  # at the moment of the peak
    by_kind_max: dict[Kind, int] = field(default_factory=dict)  # each kind's own largest moment
    holdings: list[Holding] = field(default_factory=list)  # the storages behind `by_kind`; empty without `origin_of`

    def fill(self, origins: Mapping[int, Any] | None) -> None:
        """Add up the lines, once the kind of every storage is known. `origins` is None without `origin_of`."""
        most: dict[Kind, int] = defaultdict(int)
        num_lines_at_peak = 0
        for num_lines, (total, kind, live) in enumerate(states(self.lines, self.kinds), start=1):
            most[kind] = max(most[kind], live[kind])
            if total > self.peak_bytes:
                self.peak_bytes, self.by_kind, num_lines_at_peak = total, dict(live), num_lines
        self.by_kind = {kind: self.by_kind.get(kind, 0) for kind in Kind}
        self.by_kind_max = {kind: most[kind] for kind in Kind}
        if origins is not None:
            self.holdings = holdings(self.lines[:num_lines_at_peak], self.kinds, origins)


def states(lines: Sequence[Change], kinds: Mapping[int, Kind]) -> Iterator[tuple[int, Kind, dict[Kind, int]]]:
    """After each line: the bytes that are alive, without the host's; the kind that has changed; and the bytes by kind,
    in the same mapping each time."""
    sizes: dict[int, int] = defaultdict(int)
    live, total = dict.fromkeys(Kind, 0), 0
    for serial, num_bytes in lines:
        kind, growth = kinds[serial], rounded(num_bytes) - sizes[serial]
        sizes[serial] += growth
        live[kind] += growth
        total += growth * (kind is not Kind.HOST)
        yield total, kind, live


def holdings(lines: Sequence[Change], kinds: Mapping[int, Kind], origins: Mapping[int, Any]) -> list[Holding]:
    """The storages that are alive after these lines, the largest first."""
    alive = {serial: rounded(num_bytes) for serial, num_bytes in lines}
    live = [Holding(num_bytes, kinds[serial], origins.get(serial)) for serial, num_bytes in alive.items() if num_bytes]
    return sorted(live, key=lambda holding: -holding.num_bytes)


def rounded(num_bytes: int) -> int:
    return -(-num_bytes // ROUND_BYTES) * ROUND_BYTES
