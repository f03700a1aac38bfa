"""Forward and backward passes of a batch's parts through the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowvram.compat.torch_pipelining import OF_ONE, PartsStage, Work, run_schedule, schedule_of
from lowvram.core.mesh import Ranks, stage_hosts
from lowvram.core.rig import Part, Rig, enough_samples, loss_of
from lowvram.core.shards import count_elsewhere, local
from lowvram.core.stages import PipelineStage, StageEnds, Stages
from lowvram.core.stepper import Stepper
from lowvram.knobs.sharding.boundaries import Boundaries
from lowvram.knobs.sharding.held_back import HeldBack, Product, add_gradients
from lowvram.knobs.sharding.passes import arrived_before, check_parts, passes_of


@final
class PipelineRun:
    """A `Rig.run`, and a `Rig.forward`, of one rank of a pipeline.

    Args:
        stages: of this rank.
        ranks: of the pipeline.
        schedule: the order of parts.
        forward: of the whole model, a `Rig.forward`.
        held: what the model's layers hold back.
    """

    def __init__(
        self,
        stages: Stages,
        ranks: Ranks,
        schedule: str,
        forward: Callable[[Part], Any],
        device: torch.device,
        held: HeldBack,
    ) -> None:
        self.stages, self.ranks, self.device, self.held = stages, ranks, device, held
        self._schedule, self._forward = schedule, forward
        self.num_stages = ranks.size * len(stages.own)
        self.boundaries = Boundaries(ranks, stage_hosts())

    def __call__(self, rig: Rig, parts: list[Part], total: Tensor) -> Tensor:
        """The mean loss; 0 on all ranks but the last."""
        check_parts(self._schedule, self.ranks.size, len(self.stages.own), len(parts))
        group = self.ranks.group
        assert group is not None
        passes = Passes(self, rig, parts, total)
        made: list[PartsStage] = []
        for stage in self.stages.own:
            about = self.num_stages, self.device, group, self.arrived(stage, len(parts))
            made.append(PartsStage(PassesOf(passes, stage), stage.index, *about))
        run_schedule(schedule_of(self._schedule, made, len(parts)), len(parts))
        self.sum_shared(rig)
        return torch.stack(passes.losses).sum() if passes.losses else torch.zeros((), device=self.device)

    def arrived(self, stage: PipelineStage, num_parts: int) -> Mapping[int, Sequence[int]] | None:
        """See `PartsStage`."""
        if self._schedule in OF_ONE:
            return None
        before = stage.index - 1
        orders = passes_of(self._schedule, self.ranks.size, len(self.stages.own), num_parts)
        return arrived_before(orders[self.boundaries.rank_of(before)], before)

    def sum_shared(self, rig: Rig) -> None:
        """Add up the gradients of parameters that several ranks have. The first of these counts them."""
        updated = {name: each for each, name in rig.names_of_updated.items()}
        for name, ranks in self.stages.shared.items():
            if (parameter := updated.get(name)) is not None:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(local(parameter.grad), group=ranks.group)
                if not ranks.is_first:
                    count_elsewhere(parameter.grad)

    @torch.no_grad()
    def level_shared(self, model: nn.Module) -> None:
        """After an update: give parameters that several ranks have the values of the first of these. Where updates
        round at random, each has rounded otherwise."""
        for name, ranks in self.stages.shared.items():
            ranks.send_from_first(local(model.get_parameter(name)))

    def forward(self, part: Part) -> Any:
        """The outputs of a part. Outside of a schedule, as in an evaluation, it goes through all stages; raises
        StageEnds on ranks without the last one. A collective of the pipeline's ranks."""
        if self.stages.is_computing:
            return self._forward(part)
        ends: StageEnds | None = None
        for stage in self.stages.own:
            received = None
            if stage.index:
                received = self.boundaries.room(stage, part, self.device)
                dist.recv(received, group=self.ranks.group, group_src=self.boundaries.rank_of(stage.index - 1))
            try:
                with self.stages.computing(stage, received):
                    return self._forward(part)
            except StageEnds as error:
                ends = StageEnds(error.made)
                self.boundaries.told(stage, part, ends.made)
                to = self.boundaries.rank_of(stage.index + 1)
                dist.send(ends.made.contiguous(), group=self.ranks.group, group_dst=to)
        assert ends is not None
        raise ends


@final
class Passes:
    """The passes of a step on this rank."""

    def __init__(self, run: PipelineRun, rig: Rig, parts: list[Part], total: Tensor) -> None:
        self.run, self.rig, self.parts, self.total = run, rig, parts, total
        self.losses: list[Tensor] = []
        self.num_left = len(parts) * len(run.stages.own)  # backward passes, with what they have held back


@final
class PassesOf(Work):
    """Those of one stage."""

    def __init__(self, passes: Passes, stage: PipelineStage) -> None:
        self._passes, self.stage = passes, stage
        self._held: dict[int, list[Product]] = {}  # by part

    def room(self, part: int) -> Tensor:
        run = self._passes.run
        return run.boundaries.room(self.stage, self._passes.parts[part], run.device)

    def forward(self, part: int, received: Tensor | None) -> Tensor:
        passes = self._passes
        samples = passes.parts[part]
        try:
            given = None if received is None else Given.apply(received)
            with passes.run.stages.computing(self.stage, given), enough_samples(samples, len(passes.parts)):
                loss = loss_of(passes.rig, samples, passes.total)
        except StageEnds as ends:
            passes.run.boundaries.told(self.stage, samples, ends.made)
            return ends.made.contiguous()
        passes.losses.append(loss.detach())
        return loss

    def backward(self, part: int, made: Tensor, gradient: Tensor | None, holds_back: bool) -> None:
        loss = made if gradient is None else WithGradient.apply(made, gradient)
        if not holds_back:
            with self.in_backward(is_last=True) as stepper:
                stepper.backward(loss)
            return
        with self.in_backward(is_last=False) as stepper, self._passes.run.held.holding() as self._held[part]:
            stepper.backward(loss)

    def weights(self, part: int) -> None:
        with self.in_backward(is_last=True) as stepper:
            stepper.rest(partial(add_gradients, self._held.pop(part)))

    @contextmanager
    def in_backward(self, is_last: bool) -> Iterator[Stepper]:
        """Around a pass that computes gradients of a part.

        Args:
            is_last: of this part, in this stage.
        """
        passes = self._passes
        passes.num_left -= is_last
        with passes.run.stages.in_backward(self.stage), passes.rig.sync(not passes.num_left):
            yield passes.rig.stepper


class Given(torch.autograd.Function):
    """What was received, as a tensor that a block may change in place."""

    @staticmethod
    def forward(ctx: Any, received: Tensor) -> Tensor:
        return received.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients


class WithGradient(torch.autograd.Function):
    """A number (0-dim) whose backward pass gives what a stage has made the gradient that the next stage has sent,
    whatever the number's own: a loss scale is in it already."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return made.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return ctx.gradient, None
