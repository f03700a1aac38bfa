"""Private names of torch.distributed.pipelining: its schedules, on stages that compute what they are told."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    schedules,
)
from torch.distributed.pipelining.stage import _PipelineStageBase

from lowvram.compat.torch_fake import is_fake

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}
OF_ONE = frozenset({"gpipe", "1f1b"})  # those for one stage on each rank
OF_SEVERAL = frozenset({"interleaved"})  # those for several ones; others take any number


class Work(ABC):
    """What a stage of a pipeline does with one part of a batch; tensors are this rank's.

    The schedules of torch.distributed.pipelining call it through `PartsStage`, since 2.4. Replaced with that class.
    """

    @abstractmethod
    def room(self, part: int) -> Tensor:
        """Memory for what the stage before hands on."""

    @abstractmethod
    def forward(self, part: int, received: Tensor | None) -> Tensor:
        """What the stage hands on; of the last one the loss (0-dim). None is received by the first stage."""

    @abstractmethod
    def backward(self, part: int, made: Tensor, gradient: Tensor | None, holds_back: bool) -> None:
        """The backward pass from what `forward` has made, given its gradient; None for the last stage.

        Args:
            holds_back: whether gradients of weights may be left to `weights`, which is then called later.
        """

    @abstractmethod
    def weights(self, part: int) -> None:
        """Compute the gradients that `backward` has held back."""


def schedule_of(name: str, stages: Sequence[PartsStage], num_parts: int) -> Any:
    """A schedule by its name in `SCHEDULES`, for a number of parts. Call `run_schedule` with it.

    The logger of torch.distributed.pipelining.schedules, since 2.4, tells a plan of all steps beside an error. Replaced
    by a setting, if torch makes one.
    """
    whole: Any = stages[0] if name in OF_ONE else list(stages)
    logging.getLogger(schedules.__name__).setLevel(logging.CRITICAL)
    return SCHEDULES[name](whole, num_parts, loss_fn=lambda made, _: made, scale_grads=False)


def run_schedule(schedule: Any, num_parts: int) -> None:
    """Compute forward and backward passes of all parts. A collective of the pipeline's ranks.

    The argument `return_outputs` of schedules' `step`, since 2.10: else they keep what the last stage has made.
    Replaced by a call without it, if it becomes the default.
    """
    schedule.step(target=torch.empty(num_parts, device="cpu"), return_outputs=False)


@final
class PartsStage(_PipelineStageBase):
    """A stage that has memory only for the parts that are under way. (torch's own, `PipelineStage`, keeps room for
    what it receives of all parts, forwards and backwards, and takes parts of one size alone.)

    torch.distributed.pipelining.stage._PipelineStageBase, since 2.4: its methods are what schedules call. Replaced by a
    public base class, if torch makes one.

    Args:
        work: what it does.
        index: of this stage, among `num_stages`.
        group: the ranks of the pipeline.
        arrived: where the schedule waits for no message that it has sent until the end: by part, those whose gradients
            have arrived at the stage before when that hands on this part. None: it waits for each.
    """

    def __init__(
        self,
        work: Work,
        index: int,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
        arrived: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        super().__init__(nn.Identity(), index, num_stages, device, group)
        self.work, self.arrived = work, arrived
        self.args_recv_info, self.grad_recv_info = {0: ()}, {0: ()}  # which schedules look at
        self.received: dict[int, Tensor] = {}
        self.made: dict[int, Tensor] = {}
        self.gradients: dict[int, Tensor] = {}  # of what was made
        self.returned: dict[int, Tensor | None] = {}  # the gradients of what was received
        self.sent: dict[int, Tensor] = {}  # shares memory with what was made
        self.sent_back: dict[int, Tensor] = {}  # what messages hold that nobody waits for until the end

    def clear_runtime_states(self) -> None:
        for each in (self.received, self.made, self.gradients, self.returned, self.sent, self.sent_back):
            each.clear()

    def _prepare_forward_infra(self, *args: Any, **named: Any) -> Any:
        return ()

    def _prepare_backward_infra(self, *args: Any, **named: Any) -> Any:
        return None

    def _create_grad_recv_info(self, *args: Any, **named: Any) -> Any:
        return ()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Nothing: whoever runs the schedule sums gradients."""

    @staticmethod
    def let_go(sent: Tensor | None) -> None:
        """Free the memory of what has arrived: schedules keep messages, and these hold it."""
        if sent is not None and not is_fake(sent):
            sent.set_(sent.new_empty(0).untyped_storage())

    def to(self, stage: int, operation: Any, tensor: Tensor) -> list[dist.P2POp]:
        """The message to, or from, another stage."""
        peer = dist.get_global_rank(self.group, self.stage_index_to_group_rank[stage])  # pyright: ignore[reportArgumentType]
        return [dist.P2POp(operation, tensor, peer, self.group)]

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        self.received[fwd_chunk_id] = self.work.room(fwd_chunk_id)
        return self.to(self.stage_index - 1, dist.irecv, self.received[fwd_chunk_id])

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        self.sent[fwd_chunk_id] = self.made[fwd_chunk_id].data  # with a version of its own
        return self.to(self.stage_index + 1, dist.isend, self.sent[fwd_chunk_id])

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        self.gradients[bwd_chunk_id] = torch.empty_like(self.made[bwd_chunk_id], requires_grad=False)
        return self.to(self.stage_index + 1, dist.irecv, self.gradients[bwd_chunk_id])

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        gradient = self.returned.pop(bwd_chunk_id)
        assert gradient is not None
        if self.arrived is not None:
            self.sent_back[bwd_chunk_id] = gradient
        return self.to(self.stage_index - 1, dist.isend, gradient)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        self.received[mb_index] = prev_stage_outputs.detach()

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return self.returned.pop(mb_index)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        self.gradients[mb_index] = next_stage_bwd_outputs

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **named: Any) -> Tensor:
        received = self.received.get(fwd_chunk_id)
        for part in (self.arrived or {}).get(fwd_chunk_id, ()):
            self.let_go(self.sent_back.pop(part, None))
        made = self.work.forward(fwd_chunk_id, None if received is None else received.requires_grad_())
        self.made[fwd_chunk_id] = made
        return made.detach() if self.is_last else made  # schedules keep losses, and with them what they came from

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, full_backward: bool = True, **named: Any) -> None:
        self.let_go(self.sent.pop(bwd_chunk_id, None))
        made, gradient = self.made.pop(bwd_chunk_id), self.gradients.pop(bwd_chunk_id, None)
        self.work.backward(bwd_chunk_id, made, gradient, holds_back=not full_backward)
        received = self.received.pop(bwd_chunk_id, None)
        if received is not None:
            gradient = torch.zeros_like(received) if received.grad is None else received.grad
            self.returned[bwd_chunk_id] = gradient.contiguous()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **named: Any) -> None:
        self.work.weights(bwd_chunk_id)
