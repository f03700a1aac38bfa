"""Copies between a device and host memory. On CUDA they run on two streams of their own, beside the computation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, final

import torch
from torch import Tensor

from lowvram.core import host

IN_FLIGHT_BYTES = 2**28  # that may be on their way to the host at once, and so still lie on the device


class Link(ABC):
    """Copies between one device and host memory, and counts them."""

    @abstractmethod
    def fetch(self, destination: Tensor, source: Tensor) -> Callable[[], None]:
        """Copy `source` to the host. Nobody else may write into it; it is freed when it has been copied. Returns a
        function that waits until the copy has arrived."""

    @abstractmethod
    def add(self, destination: Tensor, source: Tensor) -> Callable[[], None]:
        """Like `fetch`, but add to what is at `destination`, in its number format."""

    @abstractmethod
    def send(self, destination: Tensor, source: Tensor) -> None:
        """Copy `source` to the device. It may be written into again after `join` and `rest`."""

    @abstractmethod
    def join(self) -> None:
        """Make what the device computes from now on wait for all that was sent."""

    @abstractmethod
    def rest(self) -> None:
        """Wait until all that was sent has arrived."""


def link_to(device: torch.device) -> Link:
    return CudaLink(device) if host.copies_overlap(device) else SameMemory()


@final
class SameMemory(Link):
    """For a CPU: host and device memory are the same, but copies are made and counted as for a card."""

    def fetch(self, destination: Tensor, source: Tensor) -> Callable[[], None]:
        destination.copy_(source)
        host.traffic.to_host_bytes += source.nbytes
        return nothing

    def add(self, destination: Tensor, source: Tensor) -> Callable[[], None]:
        destination.add_(source)
        host.traffic.to_host_bytes += source.nbytes
        return nothing

    def send(self, destination: Tensor, source: Tensor) -> None:
        destination.copy_(source)
        host.traffic.to_device_bytes += destination.nbytes

    def join(self) -> None:
        pass

    def rest(self) -> None:
        pass


def nothing() -> None:
    pass


class Flight(NamedTuple):
    """A copy under way."""

    landed: torch.cuda.Event
    source: Tensor  # held until the copy has left it: its memory must not be used again before
    unload: Callable[[], None]  # what the host does when it is there


@final
class CudaLink(Link):
    """Asynchronous while the host memory is pinned. Each direction has a stream, which first waits for the stream that
    is current at the call: that one has made, or still reads, what is copied."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.down, self.up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.to_host: deque[Flight] = deque()
        self.to_device: deque[Flight] = deque()
        self.spare: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}  # pinned memory, to be used again

    def fetch(self, destination: Tensor, source: Tensor) -> Callable[[], None]:
        return self._bring(destination, source, nothing)

    def add(self, destination: Tensor, source: Tensor) -> Callable[[], None]:
        staged = self._staging(source.shape, source.dtype)

        def unload() -> None:
            destination.add_(staged)
            self._give_back(staged)

        return self._bring(staged, source, unload)

    def _bring(self, destination: Tensor, source: Tensor, unload: Callable[[], None]) -> Callable[[], None]:
        host.traffic.to_host_bytes += source.nbytes
        flight = self._start(self.down, destination, source, unload)
        self.to_host.append(flight)
        while len(self.to_host) > 1 and self.to_host[0].landed.query():
            self._land()
        while sum(other.source.nbytes for other in self.to_host) > max(IN_FLIGHT_BYTES, source.nbytes):
            self._land()
        landed = flight.landed  # whoever keeps what is returned must not keep the source on the device
        return lambda: self._land_through(landed)

    def _start(
        self, stream: torch.cuda.Stream, destination: Tensor, source: Tensor, unload: Callable[[], None]
    ) -> Flight:
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            destination.copy_(source, non_blocking=True)
            landed = torch.cuda.Event()
            landed.record(stream)
        return Flight(landed, source, unload)

    def _land_through(self, landed: torch.cuda.Event) -> None:
        """Land all up to the copy that `landed` is of: they arrive in order."""
        while any(other.landed is landed for other in self.to_host):
            self._land()

    def _land(self) -> None:
        flight = self.to_host.popleft()
        if not flight.landed.query():
            with host.traffic.waiting(self.device):
                flight.landed.synchronize()
        flight.unload()

    def send(self, destination: Tensor, source: Tensor) -> None:
        host.traffic.to_device_bytes += destination.nbytes
        while self.to_device and self.to_device[0].landed.query():
            self.to_device.popleft().unload()
        if destination.dtype == source.dtype:
            self.to_device.append(self._start(self.up, destination, source, nothing))
        else:  # torch would round into memory that isn't pinned
            rounded = self._staging(source.shape, destination.dtype).copy_(source)
            self.to_device.append(self._start(self.up, destination, rounded, lambda: self._give_back(rounded)))

    def join(self) -> None:
        with host.traffic.waiting(self.device):
            torch.cuda.current_stream(self.device).wait_stream(self.up)

    def rest(self) -> None:
        self.up.synchronize()
        while self.to_device:
            self.to_device.popleft().unload()

    def _staging(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        spares = self.spare.setdefault((shape, dtype), [])
        return spares.pop() if spares else host.empty(shape, dtype, self.device)

    def _give_back(self, staged: Tensor) -> None:
        self.spare[staged.shape, staged.dtype].append(staged)
