"""A trace: the birth and death of every storage in the build of a rig and two steps, as columns of numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import NamedTuple, final

import torch
from torch import Tensor

from lowvram.core.kind import Kind
from lowvram.core.peak import ROUND_BYTES
from lowvram.planning.memory.replay import FREE

KINDS = list(Kind)
BATCH = "logical batch"  # the maker of its tensors, in `Trace.makers`
MADE_IN, BACKWARD_OF = " in ", " in the backward pass of "  # in the names of makers, before that of a module or node


class Phase(Enum):
    """The part of a run in which an event happens."""

    BUILD = "build"  # weights get their initial values
    FORWARD = "forward"  # with the loss
    BACKWARD = "backward"  # with recomputation
    WEIGHTS = "weights"  # gradients that the backward passes of a pipeline have left for later
    UPDATE = "update"
    BETWEEN = "between"


PHASES = list(Phase)


@dataclass(frozen=True)
class Sums:
    """The sums of a trace in bytes, each storage rounded up to a multiple of 512."""

    peak_bytes: int  # of the device
    by_kind: dict[Kind, int]  # at the moment of the peak
    by_kind_max: dict[Kind, int]  # each kind's own largest moment
    by_phase: dict[Phase, int]  # the device's largest moment in each
    host_bytes: int  # the host's own largest moment
    with_host_bytes: int  # the largest moment of the sum of device and host


class Large(NamedTuple):
    """A storage that is alive at the peak."""

    num_bytes: int
    kind: Kind
    maker: str


@final
@dataclass(frozen=True, eq=False)
class Trace:
    """Events in order, one entry in each event column. An event says that a storage has `num_bytes` from now on: its
    first event is its birth, one with 0 bytes its death, others are resizes."""

    storages: Tensor  # (events,) int64: the storage's serial number, by birth
    num_bytes: Tensor  # (events,) int64: its bytes from now on, as requested
    phases: Tensor  # (events,) int64: index into `PHASES`
    kinds: Tensor  # (storages,) int64: index into `KINDS`
    makers: list[str]  # (storages,): a parameter's name, or the operator that made it and where
    streams: Tensor  # (storages,) int64: the stream on which each was asked for; 0: the default one
    second_step: int  # the first event of the second step: by then the optimizer's state exists
    first_matmuls: list[int]  # births of the first matrix product in each thread; cuBLAS then allocates a workspace
    computed: Tensor  # (pairs, columns) int64: temporary memory with the numbers that it follows from, see computed.py
    modules: list[str]  # names of the model's modules
    work: Tensor  # (operators, columns) int64: of the second step, by lowvram.planning.time.op_cost.Column

    def sized(self, num_bytes: Tensor, work: Tensor) -> Trace:
        """The same events with other sizes, and the work that goes with them."""
        other = replace(self, num_bytes=num_bytes, work=work)
        vars(other).update(before=self.before, _is_host=self._is_host)  # these don't depend on sizes
        return other

    def sums(self, is_steady: bool = False) -> Sums:
        """The sums over the whole trace, like an allocator's peak that is never reset; with `is_steady`, over the
        second step only."""
        first = self.second_step if is_steady else 0
        growth = self._growth
        on_device, live = self.device_growth, torch.zeros(len(KINDS), len(growth) + 1, dtype=torch.int64)
        live[self.kinds[self.storages], torch.arange(1, len(growth) + 1)] = growth
        live = live.cumsum(1)[:, first:]
        total = torch.cat([torch.zeros(1, dtype=torch.int64), on_device]).cumsum(0)[first:]
        at = int(total.argmax())
        most = live.amax(1).tolist()
        return Sums(
            int(total[at]),
            dict(zip(KINDS, live[:, at].tolist(), strict=True)),
            dict(zip(KINDS, most, strict=True)),
            self._by_phase(total[1:], self.phases[first:]),
            most[KINDS.index(Kind.HOST)],
            int(live.sum(0).amax()),
        )

    def _by_phase(self, total: Tensor, phases: Tensor) -> dict[Phase, int]:
        most = torch.zeros(len(PHASES), dtype=torch.int64).scatter_reduce(0, phases, total, "amax")
        return dict(zip(PHASES, most.tolist(), strict=True))

    def largest(self, num: int, is_steady: bool = False) -> list[Large]:
        """The largest storages on the device at the peak, the largest first."""
        first = self.second_step if is_steady else 0
        total = (self._growth * ~self._is_host).cumsum(0)
        last = first + int(total[first:].argmax())
        sizes = torch.zeros(len(self.kinds), dtype=torch.int64)
        sizes.scatter_add_(0, self.storages[: last + 1], self._growth[: last + 1])
        sizes[self.kinds == KINDS.index(Kind.HOST)] = 0
        top = sizes.topk(min(num, len(sizes)))
        pairs = zip(top.values.tolist(), top.indices.tolist(), strict=True)
        return [Large(size, KINDS[self.kinds[serial]], self.makers[serial]) for size, serial in pairs if size]

    def num_requests(self, event: int) -> int:
        """The number of requests (allocations and frees) to the device's allocator before an event."""
        return int(self._num_asked()[event - 1]) if event else 0

    def _num_asked(self) -> Tensor:
        """(events,) int64: the number of requests up to each event."""
        before = self._at_event_before(self.num_bytes)
        is_asked = ~self._is_host & (self.num_bytes != before)
        return (is_asked * (1 + ((before > 0) & (self.num_bytes > 0)).long())).cumsum(0)

    def requests(self, more: Iterable[tuple[int, int, int]] = ()) -> list[tuple[int, int, int]]:
        """The requests to the device's allocator, as `Event`s. A storage that is resized is freed and allocated
        anew.

        Args:
            more: further allocations, which are never freed: for each the index of the event before it (the largest
                first), the number that identifies the allocation, and its bytes.
        """
        before = self._at_event_before(self.num_bytes)
        is_asked = ~self._is_host & (self.num_bytes != before)
        storages, num_bytes, before = (column[is_asked] for column in (self.storages, self.num_bytes, before))
        asked, is_anew = num_bytes.where(num_bytes > 0, FREE), (before > 0) & (num_bytes > 0)
        if is_anew.any():
            times = 1 + is_anew.long()
            storages, asked = storages.repeat_interleave(times), asked.repeat_interleave(times)
            asked[(times.cumsum(0) - times)[is_anew]] = FREE
        streams, num_asked = self.streams[storages].tolist(), self._num_asked()
        requests = list(zip(storages.tolist(), asked.tolist(), streams, strict=True))
        for event, allocation, size in more:
            requests.insert(int(num_asked[event]), (allocation, size, 0))
        return requests

    def module_of(self, storage: int) -> str:
        """The name of the module whose forward pass made a storage, as `makers` tells it; empty if none did."""
        maker = self.makers[storage]
        return maker.partition(MADE_IN)[2] if BACKWARD_OF not in maker else ""

    @property
    def device_growth(self) -> Tensor:
        """(events,) int64: by how many bytes the event changes the device's sum, in multiples of 512."""
        return self._growth * ~self._is_host

    @property
    def lifetimes(self) -> tuple[Tensor, Tensor]:
        """Two tensors (storages,): each storage's first event, and that of its death; the number of all events if it
        doesn't die."""
        events, num_storages = torch.arange(len(self.storages)), len(self.kinds)
        births = torch.full((num_storages,), len(events)).scatter_reduce(0, self.storages, events, "amin")
        is_death = (self.num_bytes == 0) & (self.before >= 0)
        deaths = torch.full((num_storages,), len(events))
        deaths[self.storages[is_death]] = events[is_death]
        return births, deaths

    @cached_property
    def before(self) -> Tensor:
        """(events,) int64: the index of the same storage's previous event; -1 at a birth."""
        order = self.storages.argsort(stable=True)
        before = torch.full_like(order, -1)
        is_again = self.storages[order[1:]] == self.storages[order[:-1]]
        before[order[1:]] = torch.where(is_again, order[:-1], -1)
        return before

    @cached_property
    def _growth(self) -> Tensor:
        """(events,) int64: by how many bytes the event's storage grows, in multiples of 512."""
        sizes = (self.num_bytes + (ROUND_BYTES - 1)) // ROUND_BYTES * ROUND_BYTES
        return sizes - self._at_event_before(sizes)

    def _at_event_before(self, sizes: Tensor) -> Tensor:
        """(events,) int64: the size of the same storage at its previous event; 0 before its birth."""
        return sizes[self.before].where(self.before >= 0, 0)

    @cached_property
    def _is_host(self) -> Tensor:
        return self.kinds[self.storages] == KINDS.index(Kind.HOST)
