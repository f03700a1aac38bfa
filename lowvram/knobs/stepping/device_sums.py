"""Gradients that are summed over the parts of a step on their device: those of matrices in few bits."""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import gcd
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowvram.compat.torch_ops import add_all
from lowvram.core.gradient_sink import GradientSink
from lowvram.core.knob import Kind
from lowvram.core.ledger import announce
from lowvram.core.rounding import MOST_SEEDS
from lowvram.core.seeds import seed_of
from lowvram.core.shards import SquareSum, local
from lowvram.knobs.stepping.sums import Sums
from lowvram.knobs.stepping.totals import ALIGNED_NUMEL, Fp32, Total, pieces

SMALL_NUMEL = 2**16  # of a vector
SEED_STRIDE = 0x2545F491  # from one addition to the next: odd, so that no two of a step have the same seed


@final
class DeviceSums(Sums):
    """The gradients of the current step, each summed over the step's parts in few bits on its device; those of vectors
    (biases, scales of norms) in fp32. Memory lasts from a parameter's first gradient of a step until it is used. Of a
    sharded parameter only this rank's shard is kept.

    A card adds a gradient in less time than its host takes to ask for it. So those of small vectors wait until the part
    ends, and are added by one call; and what a backward pass calls doesn't say `torch.no_grad` again.

    Args:
        make: makes room for the gradient of a matrix, of so many elements, on a device.
    """

    def __init__(self, make: Callable[[int, torch.device], Total]) -> None:
        self.make = make
        self.num_steps = 0  # so far
        self._seed = 0  # of the noise of the last addition
        self._sums: dict[nn.Parameter, Total] = {}
        self._waiting: dict[nn.Parameter, Tensor] = {}  # gradients of the running part

    def begin(self, num_parts: int) -> None:
        self._sums.clear()
        self._waiting.clear()
        self.num_steps += 1
        self._seed = seed_of(str(self.num_steps)) % MOST_SEEDS

    def take(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        gradient, parameter.grad = flat(local(parameter.grad)), None
        if parameter.ndim <= 1 and gradient.untyped_storage().nbytes() <= SMALL_NUMEL * gradient.itemsize:
            self._waiting[parameter] = gradient  # it keeps no larger tensor alive, of which it is a view
        else:
            self.add(parameter, gradient)

    @torch.no_grad()
    def end_part(self) -> None:
        if not self._waiting:
            return
        gradients = torch.cat([*self._waiting.values()]).float().split([*map(len, self._waiting.values())])
        sums: list[Tensor] = []
        added: list[Tensor] = []
        for parameter, gradient in zip(self._waiting, gradients, strict=True):
            if (total := self._sums.get(parameter)) is None:
                self._sums[parameter] = Fp32(gradient)
            else:
                sums.append(total.read(0, len(gradient)))
                added.append(gradient)
        if sums:
            add_all(sums, added)
        self._waiting.clear()

    def sink_of(self, parameter: nn.Parameter) -> GradientSink | None:
        is_plain = not isinstance(parameter, DTensor) and parameter.is_contiguous()
        return RowSink(self, parameter) if is_plain else None

    def add(self, parameter: nn.Parameter, values: Tensor, start: int = 0) -> None:
        """Add the elements (n,) from `start` on of a gradient, in the order in memory."""
        if parameter not in self._sums:
            numel, device = local(parameter).numel(), values.device
            is_matrix = parameter.ndim > 1
            self._sums[parameter] = self.make(numel, device) if is_matrix else Fp32(torch.zeros(numel, device=device))
        self._seed = (self._seed + SEED_STRIDE) % MOST_SEEDS
        self._sums[parameter].add(values, self._seed, start)

    def add_to(self, parameter: nn.Parameter) -> None:
        """Add the sum of the earlier parts to the parameter's gradient, and drop the sum."""
        if (total := self._sums.pop(parameter, None)) is not None:
            assert parameter.grad is not None
            total.add_to(flat(local(parameter.grad)))

    def with_gradient(self) -> list[nn.Parameter]:
        """The smallest first: when the largest is brought back, the sums of the others are free."""
        return sorted(self._sums, key=nn.Parameter.numel)

    @torch.no_grad()
    def squares(self) -> SquareSum:
        squares = SquareSum()
        for parameter, total in self._sums.items():
            numel = local(parameter).numel()
            norms = [torch.linalg.vector_norm(total.read(start, end)) for start, end in pieces(numel)]
            norms = norms or [torch.zeros((), device=local(parameter).device)]  # a rank without a shard
            squares.add_norm(torch.linalg.vector_norm(torch.stack(norms)), parameter)
        return squares

    @torch.no_grad()
    def bring_back(self, parameter: nn.Parameter) -> None:
        total, gradient = self._sums.pop(parameter), torch.empty_like(parameter, requires_grad=False)
        for start, end in pieces(local(gradient).numel()):
            flat(local(gradient))[start:end] = total.read(start, end)
        parameter.grad = announce(gradient, Kind.GRADIENTS)

    def forget(self, parameters: Collection[nn.Parameter]) -> None:
        for parameter in parameters:
            self._sums.pop(parameter, None)

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps = state["num_steps"]


@final
class RowSink(GradientSink):
    """Adds rows of a parameter's gradient to its sum."""

    def __init__(self, sums: DeviceSums, parameter: nn.Parameter) -> None:
        self.sums, self.parameter, self.width = sums, parameter, parameter[0].numel()
        super().__init__(row_multiple=ALIGNED_NUMEL // gcd(ALIGNED_NUMEL, self.width))

    def add(self, rows: slice, piece: Tensor) -> None:
        self.sums.add(self.parameter, flat(announce(piece, Kind.GRADIENTS)), rows.start * self.width)


def flat(gradient: Tensor) -> Tensor:
    """A view of one dimension, in the order in memory: gradients have their parameter's layout, without gaps."""
    return gradient if gradient.ndim == 1 else gradient.as_strided((gradient.numel(),), (1,))
