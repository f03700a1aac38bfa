"""Copies between a device and host memory. On CUDA they run on two streams of their own, beside the computation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from lowvram.core import host

IN_FLIGHT_BYTES = 2**28  # that may be copied to the host at a time, and are still held on the device


class Link(ABC):
    """Copies between one device and host memory, and counts them.

    Attributes:
        overlaps: copies run beside the computation.
    """

    overlaps: ClassVar[bool] = True

    @abstractmethod
    def fetch(self, destination: Tensor, source: Tensor) -> Callable[[], None]:
        """Copy `source` to the host. The link holds `source` until it is copied; nobody may write into it meanwhile.
        Returns a function that waits until the copy has arrived."""

    @abstractmethod
    def add(self, destination: Tensor, source: Tensor) -> Callable[[], None]:
        """Like `fetch`, but add to `destination`, in its dtype."""

    @abstractmethod
    def send(self, destination: Tensor, source: Tensor) -> Callable[[], None]:
        """Copy `source` to the device. `source` must not be written into before `rest` has returned. Returns a function
        that makes work wait for the copy that is queued on the device from then on."""

    @abstractmethod
    def join(self) -> None:
        """Make work that is queued on the device from now on wait for all copies of `send`."""

    @abstractmethod
    def rest(self) -> None:
        """Wait until all copies of `send` have arrived."""


def link_to(device: torch.device) -> Link:
    return CudaLink(device) if host.copies_overlap(device) else SameMemory()


@final
class SameMemory(Link):
    """For a CPU: host and device memory are the same, but copies are made and counted as for a card."""

    overlaps = False

    def fetch(self, destination: Tensor, source: Tensor) -> Callable[[], None]:
        destination.copy_(source)
        host.traffic.to_host_bytes += source.nbytes
        return nothing

    def add(self, destination: Tensor, source: Tensor) -> Callable[[], None]:
        destination.add_(source)
        host.traffic.to_host_bytes += source.nbytes
        return nothing

    def send(self, destination: Tensor, source: Tensor) -> Callable[[], None]:
        destination.copy_(source)
        host.traffic.to_device_bytes += destination.nbytes
        return nothing

    def join(self) -> None:
        pass

    def rest(self) -> None:
        pass


def nothing() -> None:
    pass


class PendingCopy(NamedTuple):
    """An asynchronous copy."""

    finished: torch.cuda.Event
    source: Tensor  # held until the copy is finished, so that its memory isn't reused before
    then: Callable[[], None]  # what the host does when the copy is finished


@final
class CudaLink(Link):
    """Copies on a stream for each direction, asynchronous if the host memory is pinned. A copy first waits for the
    stream that is current at the call, which has written the source or still reads the destination."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.down, self.up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.to_host: deque[PendingCopy] = deque()
        self.to_device: deque[PendingCopy] = deque()
        self.spare: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}  # free pinned staging buffers

    def fetch(self, destination: Tensor, source: Tensor) -> Callable[[], None]:
        return self._to_host(destination, source, nothing)

    def add(self, destination: Tensor, source: Tensor) -> Callable[[], None]:
        staged = self._staging(source.shape, source.dtype)

        def then() -> None:
            destination.add_(staged)
            self._give_back(staged)

        return self._to_host(staged, source, then)

    def _to_host(self, destination: Tensor, source: Tensor, then: Callable[[], None]) -> Callable[[], None]:
        host.traffic.to_host_bytes += source.nbytes
        pending = self._start(self.down, destination, source, then)
        self.to_host.append(pending)
        while len(self.to_host) > 1 and self.to_host[0].finished.query():
            self._finish_oldest()
        while sum(other.source.nbytes for other in self.to_host) > max(IN_FLIGHT_BYTES, source.nbytes):
            self._finish_oldest()
        finished = pending.finished  # the function that is returned must not hold the source on the device
        return lambda: self._finish_through(finished)

    def _start(
        self, stream: torch.cuda.Stream, destination: Tensor, source: Tensor, then: Callable[[], None]
    ) -> PendingCopy:
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            destination.copy_(source, non_blocking=True)
            finished = torch.cuda.Event()
            finished.record(stream)
        return PendingCopy(finished, source, then)

    def _finish_through(self, finished: torch.cuda.Event) -> None:
        """Finish all copies to the host up to the one with this event; they arrive in order."""
        while any(other.finished is finished for other in self.to_host):
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        pending = self.to_host.popleft()
        if not pending.finished.query():
            with host.traffic.waiting(self.device):
                pending.finished.synchronize()
        pending.then()

    def send(self, destination: Tensor, source: Tensor) -> Callable[[], None]:
        host.traffic.to_device_bytes += destination.nbytes
        while self.to_device and self.to_device[0].finished.query():
            self.to_device.popleft().then()
        if destination.dtype == source.dtype:
            self.to_device.append(self._start(self.up, destination, source, nothing))
        else:  # torch would convert the dtype through memory that isn't pinned
            rounded = self._staging(source.shape, destination.dtype).copy_(source)
            self.to_device.append(self._start(self.up, destination, rounded, lambda: self._give_back(rounded)))
        return partial(self._wait_for, self.to_device[-1].finished)

    def _wait_for(self, finished: torch.cuda.Event) -> None:
        with host.traffic.waiting(self.device):
            torch.cuda.current_stream(self.device).wait_event(finished)

    def join(self) -> None:
        with host.traffic.waiting(self.device):
            torch.cuda.current_stream(self.device).wait_stream(self.up)

    def rest(self) -> None:
        self.up.synchronize()
        while self.to_device:
            self.to_device.popleft().then()

    def _staging(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        spares = self.spare.setdefault((shape, dtype), [])
        return spares.pop() if spares else host.empty(shape, dtype, self.device)

    def _give_back(self, staged: Tensor) -> None:
        self.spare[staged.shape, staged.dtype].append(staged)
