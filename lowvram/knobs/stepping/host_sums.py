"""Gradients that wait in host memory: fp32 sums over the parts of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor, nn

from lowvram.core import host
from lowvram.core.shards import SquareSum, local
from lowvram.knobs.stepping.copy_streams import Link, link_to


@final
class HostSums:
    """The gradients of one step after another, each summed over the step's parts in fp32 (fp64 where it is that).

    A gradient leaves the device as soon as it is computed. The host memory is taken once and kept: 4 bytes per element,
    pinned for CUDA. Where ranks share a parameter, this rank's shard is kept.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.links: dict[torch.device, Link] = {}
        for parameter in parameters:
            device = local(parameter).device
            self.links.setdefault(device, link_to(device))
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._arrivals: dict[nn.Parameter, Callable[[], None]] = {}  # of the gradients of this step
        self._is_single = True
        self._squares = SquareSum()

    def begin(self, num_parts: int) -> None:
        """A step of so many parts starts: forget the one before."""
        for wait in self._arrivals.values():  # of a step that was skipped
            wait()
        self._arrivals.clear()
        self._is_single, self._squares = num_parts == 1, SquareSum()

    @torch.no_grad()
    def take(self, parameter: nn.Parameter) -> None:
        """Add the parameter's gradient to its sum; afterwards it has none."""
        assert parameter.grad is not None
        gradient, parameter.grad = local(parameter.grad), None
        if self._is_single:
            self._squares.add(gradient, parameter)
        link, total = self.links[gradient.device], self._sum_of(parameter, gradient)
        way = link.add if parameter in self._arrivals else link.fetch
        self._arrivals[parameter] = way(total, gradient)

    def _sum_of(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        if parameter not in self._sums:
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            self._sums[parameter] = host.empty(gradient.shape, dtype, gradient.device)
        return self._sums[parameter]

    def with_gradient(self) -> list[nn.Parameter]:
        """The parameters that have a gradient in this step, in the order of arrival."""
        return list(self._arrivals)

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._arrivals

    def wait_for(self, parameter: nn.Parameter) -> Tensor:
        """The sum of a parameter's gradients, once it is whole: this rank's shard, in host memory."""
        self._arrivals[parameter]()
        return self._sums[parameter]

    def squares(self) -> SquareSum:
        """The sum of squares of this step's gradients. For a single part it was computed on the device, and needs no
        copy."""
        if not self._is_single:
            for parameter in self.with_gradient():
                self._squares.add(self.wait_for(parameter), parameter)
        return self._squares
