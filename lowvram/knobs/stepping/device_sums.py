"""Gradients that are summed over the parts of a step on their device: those of matrices in few bits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import gcd
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowvram.core.kind import Kind
from lowvram.core.ledger import announce
from lowvram.core.rounding import MOST_SEEDS
from lowvram.core.seeds import seed_of
from lowvram.core.shards import SquareSum, local
from lowvram.core.stepper import GradientSink
from lowvram.knobs.stepping.sums import Sums
from lowvram.knobs.stepping.totals import ALIGNED_NUMEL, Fp32, Total, flat, pieces

SEED_STRIDE = 0x2545F491  # from one addition to the next: odd, so that no two of a step have the same seed


class Vectors(NamedTuple):
    """Sums of small vectors, one after the other in one tensor, of which each has a view."""

    ids: list[int]
    sums: Tensor


@final
class DeviceSums(Sums):
    """The gradients of the current step, each summed over the step's parts in few bits on its device; those of vectors
    (biases, scales of norms) in fp32. Memory lasts from a parameter's first gradient of a step until it is used. Of a
    sharded parameter only this rank's shard is kept.

    A card adds a gradient in less time than its host takes to ask for it. So those of small vectors are added by one
    call; and what a backward pass calls doesn't say `torch.no_grad` again.

    Args:
        make: makes room for the gradient of a matrix, of so many elements, on a device.
    """

    def __init__(self, make: Callable[[int, torch.device], Total]) -> None:
        self.make = make
        self.num_steps = 0  # so far
        self._seed = 0  # of the noise of the last addition
        self._sums: dict[nn.Parameter, Total] = {}
        self._vectors: Vectors | None = None

    def begin(self, num_parts: int) -> None:
        self._sums.clear()
        self._vectors = None
        self.num_steps += 1
        self._seed = seed_of(str(self.num_steps)) % MOST_SEEDS

    def take(self, parameters: Sequence[nn.Parameter]) -> None:
        gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if len(parameters) == 1:
            self.add(parameters[0], gradients[0])
        else:
            self.add_vectors(parameters, gradients)

    def add_vectors(self, parameters: Sequence[nn.Parameter], gradients: list[Tensor]) -> None:
        """The same for several vectors: by one call, if they are those of the first part."""
        added, ids = torch.cat([*map(flat, gradients)]), [*map(id, parameters)]
        if self._vectors is not None and self._vectors.ids == ids:
            self._vectors.sums.add_(added)
        elif self._sums.keys().isdisjoint(parameters):
            self._vectors = Vectors(ids, added.float())
            views = self._vectors.sums.split([*map(Tensor.numel, gradients)])
            self._sums |= {parameter: Fp32(view) for parameter, view in zip(parameters, views, strict=True)}
        else:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                self.add(parameter, gradient)

    def sink_of(self, parameter: nn.Parameter) -> GradientSink | None:
        is_plain = not isinstance(parameter, DTensor) and parameter.is_contiguous()
        return RowSink(self, parameter) if is_plain else None

    def add(self, parameter: nn.Parameter, values: Tensor, start: int = 0) -> None:
        """Add values of a gradient, of any shape, in their order in memory: its elements from `start` on."""
        if (total := self._sums.get(parameter)) is None:
            total = self._sums[parameter] = self.room_for(parameter, values.device)
        self._seed = (self._seed + SEED_STRIDE) % MOST_SEEDS
        total.add(values, self._seed, start)

    def room_for(self, parameter: nn.Parameter, device: torch.device) -> Total:
        numel = local(parameter).numel()
        return self.make(numel, device) if parameter.ndim > 1 else Fp32(torch.zeros(numel, device=device))

    def add_to(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add the sums of the earlier parts to the parameters' gradients, and drop the sums."""
        for parameter in parameters:
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
        parameter.grad = announce(torch.zeros_like(parameter, requires_grad=False), Kind.GRADIENTS)
        self.add_to([parameter])

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
        self.sums.add(self.parameter, announce(piece, Kind.GRADIENTS), rows.start * self.width)
