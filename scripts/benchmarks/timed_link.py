"""A link between a device and its host that takes as long as a real one: copies are made by threads of their own, after
as much time as the bytes take at a given rate."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from lowvram.core import host
from lowvram.core.links import Link

Delay = Callable[[int], float]  # bytes -> seconds before they have arrived


class TimedLink(Link):
    """One thread for each direction; its copies are made in order."""

    def __init__(self, delay: Delay) -> None:
        self.delay = delay
        self.up, self.down = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.last_up: Future[None] | None = None

    def fetch(self, destination: Tensor, source: Tensor) -> Callable[[], None]:
        return self.down.submit(self.copy, destination, source).result

    def add(self, destination: Tensor, source: Tensor) -> Callable[[], None]:
        staged = torch.empty_like(source)
        arrival = self.down.submit(self.copy, staged, source)

        def then() -> None:
            arrival.result()
            destination.add_(staged)

        return then

    def send(self, destination: Tensor, source: Tensor) -> Callable[[], None]:
        host.traffic.to_device_bytes += destination.nbytes
        self.last_up = self.up.submit(self.copy, destination, source)
        return self.last_up.result

    def join(self) -> None:
        self.rest()

    def rest(self) -> None:
        if self.last_up is not None:
            self.last_up.result()

    @torch.no_grad()
    def copy(self, destination: Tensor, source: Tensor) -> None:
        time.sleep(self.delay(source.nbytes))
        destination.copy_(source)
