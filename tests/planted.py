"""Well-known bugs, as knobs: what the laws must catch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowvram.core.knob import Knob, Stage
from lowvram.core.rig import Part, Rig
from lowvram.knobs.accum import Parts


@dataclass(frozen=True)
class Stock(Knob):
    """torch's checkpointing as it comes, which updates BatchNorm's statistics twice."""

    preserve_rng_state: bool = True
    stage = Stage.CHECKPOINT

    def apply(self, rig: Rig) -> Rig:
        options = {"use_reentrant": False, "preserve_rng_state": self.preserve_rng_state}
        for block in rig.structure.blocks:
            block.forward = partial(checkpoint, block.forward, **options)
        return rig


@dataclass(frozen=True)
class MeanOfMeans(Knob):
    """Four parts that count the same, however many targets each has."""

    stage = Stage.SHARD
    band = 2e-6

    def apply(self, rig: Rig) -> Rig:
        return replace(rig, run=mean_of_means)


def mean_of_means(rig: Rig, parts: list[Part], total: Tensor) -> Tensor:
    losses = []
    for part in Parts(4).split(*parts):
        loss = rig.criterion(rig.forward(part), part) / part.num_targets / 4
        rig.stepper.backward(loss)
        losses.append(loss.detach())
    return torch.stack(losses).sum()


@dataclass(frozen=True)
class Forgetful(Knob):
    """Two parts, of which the second is the first once more: half of the batch is never seen."""

    stage = Stage.SHARD
    band = 2e-6

    def apply(self, rig: Rig) -> Rig:
        return replace(rig, run=half_of_the_batch)


def half_of_the_batch(rig: Rig, parts: list[Part], total: Tensor) -> Tensor:
    first = Parts(2).split(*parts)[0]
    loss = rig.criterion(rig.forward(first), first) / first.num_targets
    rig.stepper.backward(loss)
    return loss.detach()
