"""ema: exponential moving averages of the weights, which often score better than the last ones.

Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging" (1992); as torch.optim.swa_utils does with
`AveragedModel(multi_avg_fn=get_ema_multi_avg_fn(decay))`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from lowvram.compat.torch_ops import move_all
from lowvram.config.errors import require
from lowvram.core import host
from lowvram.core.fact import Fact
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob, Neutral, Stage
from lowvram.core.ledger import announce
from lowvram.core.mesh import tell_once
from lowvram.core.probes.weights import REAL_WEIGHTS, SEPARATE_MEMORY
from lowvram.core.rig import Rig
from lowvram.core.shards import local, placed, reshard, row_order, set_row_order, spread_as
from lowvram.core.stepper import Stepper, StepperAround, Update

STATE = "ema"  # in a saved state
PIECE_ELEMENTS = 2**22  # of a weight in 16 bits that are converted at a time: 16 MiB in fp32


@final
@dataclass(frozen=True)
class NoAverages(Neutral):
    """No averages."""

    stage = Stage.STEPPING
    searched = False


@final
@dataclass(frozen=True)
class Averages(Knob):
    """An average of each weight that trains, in fp32 (fp64 if the weight is), where the weight is kept: on the device,
    or with offload=parameters on the host. With shards each rank has those of its own.

    The first update copies the weights, the others move the average by 1 - decay towards them, as torch's
    AveragedModel. As there by default (use_buffers=False), buffers such as BatchNorm's statistics aren't averaged: they
    are those of the last step.
    """

    decay: float = 0.999
    every: int = 1
    evaluate: bool = False

    stage = Stage.STEPPING
    chosen_by_user = True
    needs_always = frozenset({Fact.DEVICE_WEIGHTS, Fact.EVERY_PARAMETER, REAL_WEIGHTS, SEPARATE_MEMORY})

    def __post_init__(self) -> None:
        require(0 <= self.decay < 1, "ema.decay", self.decay, "at least 0 and below 1, such as 0.999")
        require(self.every >= 1, "ema.every", self.every, "at least 1 update")

    def caveat(self, model: nn.Module) -> str | None:
        del model
        return "evaluations are of averages of the weights (ema.evaluate=true)" if self.evaluate else None

    def apply(self, rig: Rig) -> Rig:
        stepper = AveragingStepper(rig.stepper, rig.updated, self.decay, self.every)
        averaged = partial(stepper.in_place, rig.model, rig.finish)
        return replace(
            rig, stepper=stepper, averaged=averaged, evaluating=averaged if self.evaluate else rig.evaluating
        )


@final
class AveragingStepper(StepperAround):
    """Averages the weights after updates; a step that is skipped counts for none.

    Args:
        weights: what the inner stepper updates: all that ever train.
        every: updates from one average to the next.
    """

    def __init__(self, inner: Stepper, weights: Sequence[nn.Parameter], decay: float, every: int) -> None:
        super().__init__(inner)
        self.weights, self.decay, self.every = weights, decay, every
        self.num_applied = 0
        self.averages = [average_of(weight) for weight in weights]

    def update(self) -> Update:
        update = self.inner.update()
        if update.applied:
            self.num_applied += 1
            if self.num_applied % self.every == 0:
                self.average(1.0 if self.num_applied == self.every else 1 - self.decay)
        return update

    @torch.no_grad()
    def average(self, share: float) -> None:
        """Move the averages by this share towards the weights."""
        pairs = [*self.pairs()]
        if share == 1.0:
            for average, weight in pairs:
                average.copy_(weight)
            return
        alike = [pair for pair in pairs if pair[0].dtype is pair[1].dtype]
        if alike:
            move_all([average for average, _ in alike], [weight for _, weight in alike], share)
        for average, weight in pairs:
            if average.dtype is not weight.dtype:
                move_in_pieces(average, weight, share)

    @contextmanager
    def in_place(self, model: nn.Module, finish: Callable[[], None]) -> Iterator[None]:
        """Inside it the model has the averages as its weights; afterwards it has its own again, to the bit. Before the
        first average there are none, and it has its own.

        Args:
            finish: what is called after updates.
        """
        if self.num_applied < self.every:
            tell_once(
                f"ema: after {self.num_applied} updates there is no average yet (ema.every={self.every}), so the last"
                " weights stand for it"
            )
            yield
            return
        kept = self.put_in(model, finish)
        try:
            yield
        finally:
            self.put_back(model, finish, kept)

    @torch.no_grad()
    def put_in(self, model: nn.Module, finish: Callable[[], None]) -> list[Tensor | None]:
        """Averages and weights change places. A weight of fewer bits than its average can't hold it: of such weights
        copies are returned, in their place."""
        reshard(model)
        kept: list[Tensor | None] = []
        for average, weight in self.pairs():
            is_narrow = weight.dtype is not average.dtype
            kept.append(announce(weight.clone(), Kind.OTHER) if is_narrow else None)
            if is_narrow:
                weight.copy_(average)
            else:
                swap(average, weight)
        finish()
        return kept

    @torch.no_grad()
    def put_back(self, model: nn.Module, finish: Callable[[], None], kept: Sequence[Tensor | None]) -> None:
        """The inverse of `put_in`, given what that has returned."""
        reshard(model)
        for (average, weight), copy in zip(self.pairs(), kept, strict=True):
            if copy is None:
                swap(average, weight)
            else:
                weight.copy_(copy)
        finish()

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's part of each average and of its weight. `data`: steppers that keep masters would take a new
        version of a weight for one that others have written."""
        for average, weight in zip(self.averages, self.weights, strict=True):
            yield local(average), local(weight).data

    def state_dict(self) -> dict[str, Any]:
        """The inner stepper's with one entry more, so that a run may go on without averages, or begin to have some."""
        averages = [average.detach() for average in self.averages]
        return {**self.inner.state_dict(), STATE: {"num_applied": self.num_applied, "averages": averages}}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A state without averages, of a run that had none, has the next update begin them."""
        own: dict[str, Any] = state.get(STATE, {"num_applied": 0, "averages": self.averages})
        self.inner.load_state_dict({name: value for name, value in state.items() if name != STATE})
        self.num_applied = own["num_applied"]
        for average, saved in zip(self.averages, own["averages"], strict=True):
            local(average).copy_(local(placed(saved, average)))


@torch.no_grad()
def average_of(weight: nn.Parameter) -> Tensor:
    """A copy of a weight, laid out over the ranks as it is, in at least fp32; in host memory if the weight is."""
    own = local(weight).detach()
    copy = own.to(torch.promote_types(own.dtype, torch.float32), copy=True)
    average = spread_as(weight, host.mark(copy) if host.holds(own) else copy)
    set_row_order(average, row_order(weight))
    return average


def swap(average: Tensor, weight: Tensor) -> None:
    before = announce(weight.clone(), Kind.OTHER)
    weight.copy_(average)
    average.copy_(before)


def move_in_pieces(average: Tensor, weight: Tensor, share: float) -> None:
    """Move an average by this share towards a weight of fewer bits, some rows at a time."""
    rows = max(1, PIECE_ELEMENTS * max(1, weight.shape[0] if weight.ndim else 1) // max(1, weight.numel()))
    parts = zip(torch.atleast_1d(average).split(rows), torch.atleast_1d(weight).split(rows), strict=True)
    for part, of_weight in parts:
        part.lerp_(announce(of_weight.to(part.dtype), Kind.OTHER), share)
