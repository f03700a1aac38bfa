"""Gradients in host memory: fp32 sums over the parts of a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from lowvram.core import host
from lowvram.core.kind import Kind
from lowvram.core.ledger import announce
from lowvram.core.links import Link, link_to
from lowvram.core.shards import SquareSum, local
from lowvram.knobs.stepping.sums import Sums


@final
class HostSums(Sums):
    """The gradients of the current step, each summed over the step's parts in fp32 (fp64 if it is fp64).

    A gradient leaves the device as soon as it is computed. The host memory is allocated once and kept: 4 bytes per
    element, pinned for CUDA. Of a sharded parameter only this rank's shard is kept.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.links: dict[torch.device, Link] = {}
        for parameter in parameters:
            device = local(parameter).device
            self.links.setdefault(device, link_to(device))
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._arrivals: dict[nn.Parameter, Callable[[], None]] = {}  # waits for the gradient of this step to arrive
        self._is_single = True
        self._squares = SquareSum()

    def begin(self, num_parts: int) -> None:
        for wait in self._arrivals.values():  # copies of a skipped step may still be running
            wait()
        self._arrivals.clear()
        self._is_single, self._squares = num_parts == 1, SquareSum()

    def take(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            self.take_one(parameter)

    @torch.no_grad()
    def take_one(self, parameter: nn.Parameter) -> None:
        """Add the parameter's gradient to its sum, and set it to None."""
        if parameter.grad is None:  # autograd calls hooks also where a function returns no gradient
            return
        gradient, parameter.grad = local(parameter.grad), None
        if self._is_single and parameter in self._arrivals:  # in several pieces, as of a reentrant checkpoint
            self._is_single, self._squares = False, SquareSum()
        if self._is_single:
            self._squares.add(gradient, parameter)
        link, total = self.links[gradient.device], self._sum_of(parameter, gradient)
        copy = link.add if parameter in self._arrivals else link.fetch
        self._arrivals[parameter] = copy(total, gradient)

    def forget(self, parameters: Collection[nn.Parameter]) -> None:
        for parameter in parameters:
            self._arrivals.pop(parameter, lambda: None)()  # the copy of a skipped step may still be running
            self._sums.pop(parameter, None)

    def _sum_of(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        if parameter not in self._sums:
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            self._sums[parameter] = host.empty(gradient.shape, dtype, gradient.device)
        return self._sums[parameter]

    def with_gradient(self) -> list[nn.Parameter]:
        return list(self._arrivals)

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._arrivals

    def wait_for(self, parameter: nn.Parameter) -> Tensor:
        """Wait for the sum of a parameter's gradients and return it: in host memory, of this rank's shard."""
        self._arrivals[parameter]()
        return self._sums[parameter]

    def squares(self) -> SquareSum:
        """For a single part, whose gradients came whole, it was computed on the device, without waiting for copies."""
        if not self._is_single:
            for parameter in self.with_gradient():
                self._squares.add(self.wait_for(parameter), parameter)
        return self._squares

    @torch.no_grad()
    def bring_back(self, parameter: nn.Parameter) -> None:
        values = self.wait_for(parameter)
        if host.holds(parameter):  # offload=parameters: the weight is updated there
            with host.computing():
                gradient = torch.empty_like(parameter, dtype=parameter.dtype, requires_grad=False)
                local(gradient).copy_(values)
            parameter.grad = gradient
            return
        gradient = torch.empty_like(parameter, dtype=values.dtype, requires_grad=False)
        link = self.links[local(gradient).device]
        link.send(local(gradient), values)
        link.join()
        parameter.grad = announce(gradient.to(parameter.dtype), Kind.GRADIENTS)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state
