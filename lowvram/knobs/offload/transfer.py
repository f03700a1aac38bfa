"""How storages leave the device and come back: in order with the computation, or on streams of their own beside it.

On a card the order between streams must be right; an error corrupts gradients silently (torchtitan#2581). The rules:

1. A copy waits for all work queued on the computing stream before it.
2. A storage that leaves keeps its device memory until the computing stream has waited for the copy. The copy back waits
   for the computing stream, so the buffer is filled by then. All copies out run on one stream, so a reused buffer is
   overwritten only after its earlier copy.
3. The copy back goes into memory allocated on the computing stream, which waits for the copy before it reads.
4. If a storage that came back is never read, `record_stream` makes the allocator wait for the copy before it reuses
   the memory.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from lowvram.compat.torch_autograd import version_of
from lowvram.core import host
from lowvram.core.saved import Copy, Saved
from lowvram.knobs.offload.buffers import Buffer, Pool


@final
@dataclass(eq=False)
class Away(Copy):
    """A copy of one storage outside the device. It lives as long as the graph; then its buffer is free again."""

    transfer: Transfer
    pool: Pool
    buffer: Buffer
    source: weakref.ref[torch.UntypedStorage]
    dtype: torch.dtype
    num_elements: int
    readers: weakref.WeakSet[AwayView] = field(default_factory=weakref.WeakSet)
    here: Tensor | None = None  # (num_elements,) the storage on the device, while it hasn't left or is back
    version: int = 0  # of `here` when the copy out began
    num_passes: int = 0  # backward passes that have read all views of it
    is_spoiled: bool = False  # it was changed in place during the copy out
    leaving: torch.cuda.Event | None = None  # the end of the copy out, until the computing stream has waited for it
    coming: torch.cuda.Event | None = None  # the end of the copy back, until the computing stream has waited for it
    index: int = 0  # its number in the order of leaving

    @property
    def outside(self) -> Tensor:
        """(num_elements,) in the buffer."""
        return self.buffer.like(self.dtype, self.num_elements)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    def view(self, tensor: Tensor) -> Saved:
        return AwayView(self, tensor)

    def read_by(self, reader: AwayView) -> Tensor:
        """The storage on the device (num_elements,). When every saved view of it has been read, its device memory may
        be freed; freed earlier it would have to be copied again."""
        flat = self.transfer.come_back(self)
        reader.is_read = True
        if all(each.is_read for each in self.readers):
            self.transfer.let_go(self)
            self.num_passes += 1
            for each in self.readers:
                each.is_read = False  # for the next backward pass over the same graph
        return flat

    def __del__(self) -> None:
        self.transfer.forget(self)
        self.pool.give_back(self.buffer)


@final
class AwayView(Saved):
    """A saved tensor: a view of a storage that was copied out."""

    def __init__(self, away: Away, tensor: Tensor) -> None:
        self.away, self.dtype, self.is_read = away, tensor.dtype, False
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        away.readers.add(self)

    def read(self) -> Tensor:
        return self.away.read_by(self).view(self.dtype).as_strided(self.size, self.stride, self.offset)


class Transfer(ABC):
    """Moves storages out and back."""

    @abstractmethod
    def leave(self, away: Away, flat: Tensor) -> None:
        """Copy `flat`, a whole storage, into the buffer, and drop it when the copy is done."""

    @abstractmethod
    def come_back(self, away: Away) -> Tensor:
        """The storage on the device, ready to be read by work that is queued from now on. It stays until `let_go`."""

    @abstractmethod
    def let_go(self, away: Away) -> None:
        """Drop the storage on the device; its memory is freed with the last view."""

    def forget(self, away: Away) -> None:
        """Called when the graph is gone, so that nobody will read it any more."""
        del away


@final
class Direct(Transfer):
    """One copy after the other: for a CPU, where nothing can overlap."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def leave(self, away: Away, flat: Tensor) -> None:
        with host.traffic.waiting(self._device):
            away.outside.copy_(flat)
        away.buffer.settle()
        host.traffic.to_host_bytes += away.num_bytes

    def come_back(self, away: Away) -> Tensor:
        if away.here is None:
            away.here = torch.empty(away.num_elements, dtype=away.dtype, device=self._device)
            with host.traffic.waiting(self._device):
                away.here.copy_(away.outside)
            away.buffer.settle()
            host.traffic.to_device_bytes += away.num_bytes
        return away.here

    def let_go(self, away: Away) -> None:
        away.here = None


@final
class Streams(Transfer):
    """Copies on two streams beside the computation, on a card. At most `in_flight` storages leave at a time, so that
    memory doesn't depend on how far the CPU runs ahead of the card; as many are prefetched in the backward pass."""

    def __init__(self, device: torch.device, in_flight: int) -> None:
        self._device, self._in_flight = device, in_flight
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._queue: deque[weakref.ref[Away]] = deque()  # what leaves, the oldest first
        self._order: list[weakref.ref[Away]] = []  # all that left, in order; the backward pass reads from the end
        self._num_alive = 0

    def leave(self, away: Away, flat: Tensor) -> None:
        self._put_in_order(away)
        away.here, away.version = flat, version_of(flat)
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        away.leaving = self._copy(self._out, away, away.outside, flat)
        host.traffic.to_host_bytes += away.num_bytes
        self._queue.append(weakref.ref(away))
        if len(self._queue) > self._in_flight and (oldest := self._queue.popleft()()):
            self._finish_leaving(oldest)

    def _put_in_order(self, away: Away) -> None:
        if not self._num_alive:
            self._order.clear()
        self._num_alive += 1
        away.index = len(self._order)
        self._order.append(weakref.ref(away))

    def come_back(self, away: Away) -> Tensor:
        if away.here is None:
            self._fetch(away)
        for earlier in self._wanted_next(away):
            self._fetch(earlier)
        self._wait_for(away.coming)
        away.coming = None
        if away.is_spoiled or self._is_changed(away):
            raise RuntimeError("a tensor that the backward pass needs was changed in place after it was saved")
        assert away.here is not None
        return away.here

    def _wanted_next(self, away: Away) -> Iterator[Away]:
        """The storages that left just before this one and aren't on the device, without those that this backward pass
        has already read."""
        for reference in self._order[max(0, away.index - self._in_flight) : away.index]:
            earlier = reference()
            if earlier is not None and earlier.here is None and earlier.num_passes <= away.num_passes:
                yield earlier

    def _fetch(self, away: Away) -> None:
        away.here = torch.empty(away.num_elements, dtype=away.dtype, device=self._device)
        self._back.wait_stream(torch.cuda.current_stream(self._device))  # it may still use that memory's last tensor
        away.coming = self._copy(self._back, away, away.here, away.outside)
        host.traffic.to_device_bytes += away.num_bytes

    def _finish_leaving(self, away: Away) -> None:
        if away.leaving is not None:
            self._wait_for(away.leaving)
            away.is_spoiled = self._is_changed(away)
            away.leaving = away.here = None

    def _is_changed(self, away: Away) -> bool:
        return away.leaving is not None and away.here is not None and version_of(away.here) != away.version

    def let_go(self, away: Away) -> None:
        """Drop the storage on the device, unless its copy out may still be running: waiting for that would take time,
        and only the last `in_flight` storages are concerned."""
        if away.leaving is None:
            away.here = None

    def forget(self, away: Away) -> None:
        self._num_alive -= 1
        if away.coming is not None and away.here is not None:
            away.here.record_stream(self._back)

    def _copy(self, stream: torch.cuda.Stream, away: Away, to: Tensor, source: Tensor) -> torch.cuda.Event:
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(stream)
        away.buffer.settle()
        return copied

    def _wait_for(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            with host.traffic.waiting(self._device):
                torch.cuda.current_stream(self._device).wait_event(event)


def transfer_for(device: torch.device, in_flight: int) -> Transfer:
    return Streams(device, in_flight) if host.copies_overlap(device) else Direct(device)
