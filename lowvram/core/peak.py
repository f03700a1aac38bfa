"""The peak of live bytes, computed from a ledger's lines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

from lowvram.core.knob import Kind

ROUND_BYTES = 512  # the CUDA caching allocator's
NUM_MOMENTS = 200  # of a step's course
Change = tuple[int, int]  # serial number of a storage, and its bytes from now on: 0 at its death


class Holding(NamedTuple):
    """A storage that was alive at the peak."""

    num_bytes: int
    kind: Kind
    origin: Any  # what `origin_of` returned at its allocation; None if it wasn't called


@final
@dataclass
class Peak:
    """What a ledger has counted, in bytes; filled when it closes."""

    peak_bytes: int = 0
    by_kind: dict[Kind, int] = field(default_factory=dict)  # at the moment of the peak
    by_kind_max: dict[Kind, int] = field(default_factory=dict)  # each kind's own largest moment
    holdings: list[Holding] = field(default_factory=list)  # the storages behind `by_kind`; empty without `origin_of`
    changes: Sequence[Change] = field(
        default=(), compare=False
    )  # births, resizes and deaths of storages, in their order
    kinds: Mapping[int, Kind] = field(default_factory=dict, compare=False)  # of storages, by serial number

    def fill(self, lines: Sequence[Change], kinds: Mapping[int, Kind], origins: Mapping[int, Any] | None) -> None:
        """Add up the lines, once the kind of every storage is known. `origins` is None without `origin_of`."""
        self.changes, self.kinds = lines, kinds
        sizes: dict[int, int] = defaultdict(int)
        live: dict[Kind, int] = defaultdict(int)
        most: dict[Kind, int] = defaultdict(int)
        total = num_lines_at_peak = 0
        for num_lines, (serial, num_bytes) in enumerate(lines, start=1):
            kind, growth = kinds[serial], rounded(num_bytes) - sizes[serial]
            sizes[serial] += growth
            live[kind] += growth
            most[kind] = max(most[kind], live[kind])
            total += growth * (kind is not Kind.HOST)
            if total > self.peak_bytes:
                self.peak_bytes, self.by_kind, num_lines_at_peak = total, dict(live), num_lines
        self.by_kind = {kind: self.by_kind.get(kind, 0) for kind in Kind}
        self.by_kind_max = {kind: most[kind] for kind in Kind}
        if origins is not None:
            self.holdings = holdings(lines[:num_lines_at_peak], kinds, origins)

    def course(self, num_moments: int = NUM_MOMENTS) -> dict[Kind, list[int]]:
        """How the bytes of each kind came and went, at up to `num_moments` moments. Each is the one with the most bytes
        among as many changes, so the peak is one of them."""
        stride = max(1, -(-len(self.changes) // num_moments))
        sizes: dict[int, int] = defaultdict(int)
        live = dict.fromkeys(Kind, 0)
        moments: list[tuple[int, dict[Kind, int]]] = []
        for number, (serial, num_bytes) in enumerate(self.changes):
            growth = rounded(num_bytes) - sizes[serial]
            sizes[serial] += growth
            live[self.kinds[serial]] += growth
            total = sum(live.values()) - live[Kind.HOST]
            if number % stride == 0:
                moments.append((total, dict(live)))
            elif total > moments[-1][0]:
                moments[-1] = total, dict(live)
        return {kind: [moment[kind] for _, moment in moments] for kind in Kind}


def holdings(lines: Sequence[Change], kinds: Mapping[int, Kind], origins: Mapping[int, Any]) -> list[Holding]:
    """The storages that are alive after these lines, the largest first."""
    alive = {serial: rounded(num_bytes) for serial, num_bytes in lines}
    live = [Holding(num_bytes, kinds[serial], origins.get(serial)) for serial, num_bytes in alive.items() if num_bytes]
    return sorted(live, key=lambda holding: -holding.num_bytes)


def rounded(num_bytes: int) -> int:
    return -(-num_bytes // ROUND_BYTES) * ROUND_BYTES
