"""sharding=zero1: every rank holds the whole model, and the optimizer's state of its own rows of each weight.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020): stage 1, and with
`reduce_every_part` stage 2. torch's ZeroRedundancyOptimizer isn't used: it gives each rank whole parameters, of which
one may be half of a model. Where layers are split over the ranks of a row, too (in_rows.py), a rank's rows are those of
its part of a weight, laid out as FSDP2 lays them out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from lowvram.compat.torch_distributed import accept_gathers_in_turn, all_gather, part_of_parts, reduce_scatter
from lowvram.config.errors import require
from lowvram.core.copies import register_copy
from lowvram.core.fact import Fact
from lowvram.core.kind import Kind
from lowvram.core.mesh import device_mesh, split_mesh
from lowvram.core.probes.weights import REAL_WEIGHTS, SEPARATE_MEMORY
from lowvram.core.probes.writes import STEADY_WEIGHTS
from lowvram.core.rig import Rig
from lowvram.core.shards import local, make_contiguous, spread_as, with_notes
from lowvram.core.stages import stages_of
from lowvram.knobs.sharding.base import over_ranks
from lowvram.knobs.sharding.ddp import gradients_summed
from lowvram.knobs.sharding.gradient_sum import GradientSum
from lowvram.knobs.sharding.in_rows import InRows

MOST_IN_FLIGHT = 2  # whole gradients that wait until their sum has been sent


@dataclass(frozen=True)
class ZeRO1(InRows):
    """Every rank updates its rows of each weight, and gets the others from the ranks that have updated them. Gradients
    are summed in every part, so that a rank keeps its rows of them alone; else whole ones until the last part."""

    reduce_every_part: bool = True

    saves = Kind.OPTIMIZER
    needs_always = InRows.needs_always | {
        *(Fact.GRADS_AT_UPDATE, Fact.SAME_PARAMS),
        *(SEPARATE_MEMORY, REAL_WEIGHTS, STEADY_WEIGHTS),
    }
    breaks_always = frozenset({Fact.WHOLE_UPDATES, Fact.OWN_SHARE})

    def __post_init__(self) -> None:
        super().__post_init__()
        allowed = "1, or the ranks of a row: with all ranks in one row no state is left to share out (sharding=tensor)"
        require(self.tensor is not None, "sharding.tensor", self.tensor, allowed)

    def apply(self, rig: Rig) -> Rig:
        accept_gathers_in_turn()
        make_contiguous(rig.model)
        rows, told = OwnRows(device_mesh(rig.device), split_mesh()), set[str]()
        stages = stages_of(rig.model) if self.reduce_every_part else None

        def row_sum(names: Mapping[nn.Parameter, str]) -> RowSum:
            """Of a rank with several stages only those of the stage whose gradients a pass computes."""
            return RowSum(rows, names if stages is None else stages.with_gradients(names))

        def sync(is_last: bool) -> AbstractContextManager[None]:
            is_summed = is_last or self.reduce_every_part
            return gradients_summed(rig.model, told, True, row_sum) if is_summed else nullcontext()

        def finish() -> None:
            rig.finish()
            rows.gather()

        return self.in_rows(replace(over_ranks(rig), sync=sync, updated_of=rows.of, finish=finish))


@final
class OwnRows:
    """This rank's rows of each parameter, sharing its memory: as many on each rank, but fewer on the last ones where
    they don't divide. Of a parameter that is split over a row, rows of this rank's part.

    Args:
        mesh: of the ranks that share out the rows, in one dimension.
        split: the same ranks, and in a second dimension those over which layers are split; None if they aren't.
    """

    def __init__(self, mesh: DeviceMesh, split: DeviceMesh | None = None) -> None:
        self._mesh, self._split, self.group = mesh, split, mesh.get_group()
        self._parts: dict[nn.Parameter, nn.Parameter] = {}

    def of(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        """What the optimizer updates: parameters with the shapes of these, sharded as FSDP would."""
        return [self.part(parameter) for parameter in parameters]

    def part(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.dim() == 0:  # whole on each rank
            return parameter
        if parameter not in self._parts:
            rows, (mesh, places) = self.own(local(parameter.detach())), self._layout(parameter)
            shape, stride = parameter.shape, parameter.stride()
            sharded = DTensor.from_local(rows, mesh, places, run_check=False, shape=shape, stride=stride)
            self._parts[parameter] = with_notes(register_copy(nn.Parameter(sharded), parameter), parameter)
        return self._parts[parameter]

    def _layout(self, parameter: nn.Parameter) -> tuple[DeviceMesh, list[Placement]]:
        """The ranks over which a parameter's rows are shared out, and how."""
        if not isinstance(parameter, DTensor):
            return self._mesh, [Shard(0)]
        assert self._split is not None
        (place,) = parameter.placements
        return self._split, [part_of_parts(place, self._split.size(1)), place]

    def own(self, tensor: Tensor) -> Tensor:
        """This rank's rows of a tensor."""
        num, begin = self.num_rows(tensor), self._mesh.get_local_rank() * self.num_rows(tensor)
        return tensor[min(begin, len(tensor)) : min(begin + num, len(tensor))]

    def num_rows(self, tensor: Tensor) -> int:
        """How many rows of a tensor a rank has at most."""
        return -(-len(tensor) // self._mesh.size())

    def filled_up(self, tensor: Tensor, num_rows: int) -> Tensor:
        """The tensor; with rows of zeros at its end, if it has fewer than `num_rows`."""
        missing = num_rows - len(tensor)
        return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor

    def gather(self) -> None:
        """After an update: give each parameter the rows that other ranks have updated."""
        for parameter in self._parts:
            whole = local(parameter.detach())
            num = self.num_rows(whole)
            rows = self.filled_up(self.own(whole), num)
            is_even = len(whole) == num * self._mesh.size()
            gathered = whole if is_even else whole.new_empty(num * self._mesh.size(), *whole.shape[1:])
            all_gather(gathered, rows.clone() if is_even else rows, self.group)
            if not is_even:
                whole.copy_(gathered[: len(whole)])


@final
class RowSum(GradientSum):
    """As `GradientSum`, but each rank gets the sums of its own rows alone, and no gradient stays whole."""

    option = "zero1"

    def __init__(self, rows: OwnRows, names: Mapping[nn.Parameter, str]) -> None:
        super().__init__(names)
        self._rows = rows
        self._in_flight: deque[tuple[Tensor, Tensor, Tensor, dist.Work]] = deque()
        self._first: set[Tensor] = set()  # whose sum is the first of this step

    def send(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        if parameter.dim() == 0:
            super().send(parameter)
            return
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
            self.unused.add(parameter)
        gradient = local(parameter.grad)
        num = self._rows.num_rows(gradient)
        whole = self._rows.filled_up(gradient, num * self._rows.group.size()).contiguous()
        parameter.grad = None
        rows = whole.new_empty(num, *whole.shape[1:])
        work = reduce_scatter(rows, whole, self._rows.group)
        self.sent.add(parameter)
        self._in_flight.append((parameter, rows, whole, work))
        while len(self._in_flight) > MOST_IN_FLIGHT:
            self._take()

    def _take(self) -> None:
        """Wait for the oldest sum, and add it to what earlier parts have left."""
        parameter, rows, _, work = self._in_flight.popleft()
        assert isinstance(parameter, nn.Parameter)
        work.wait()
        part = self._rows.part(parameter)
        rows = rows[: len(local(part))]
        if part.grad is None:
            part.grad = spread_as(part, rows)
            self._first.add(parameter)
        else:
            local(part.grad).add_(rows)

    def finish(self) -> None:
        while self.waiting_for:
            self.send(self.waiting_for.pop())
        while self._in_flight:
            self._take()
        super().finish()

    def forget(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        if parameter.dim() == 0:
            super().forget(parameter)
        elif parameter in self._first:
            self._rows.part(parameter).grad = None
