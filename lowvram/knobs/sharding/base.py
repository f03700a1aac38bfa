"""What the options of `sharding` share."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from torch import Tensor, nn

from lowvram.compat.torch_modules import BatchNorm
from lowvram.config.errors import require
from lowvram.core.fact import Fact
from lowvram.core.knob import Knob, Neutral, Stage
from lowvram.core.mesh import data_ranks, target_ranks
from lowvram.core.rank_buffers import RankBuffers
from lowvram.core.rig import Part, Rig
from lowvram.core.slices import weight_among_ranks


@dataclass(frozen=True)
class Sharding(Knob):
    """The base of this group's options."""

    ranks: str = "auto"
    timeout_s: float = 45.0

    stage = Stage.SHARD

    def __post_init__(self) -> None:
        is_number = bool(re.fullmatch(r"0*[1-9]\d{0,8}", self.ranks))
        require(self.ranks == "auto" or is_number, "sharding.ranks", self.ranks, "auto or at least 1")
        is_positive = 0 < self.timeout_s < math.inf
        require(is_positive, "sharding.timeout_s", self.timeout_s, "more than 0 seconds")


@dataclass(frozen=True)
class Unsharded(Neutral, Sharding):
    """One process holds everything."""

    searched = False
    needs_always = frozenset({Fact.ONE_RANK})


class DataParallel(Sharding):
    """Options that slice the logical batch over the ranks."""

    band = 2e-6
    needs_always = frozenset({Fact.MANY_RANKS})

    def caveat(self, model: nn.Module) -> str | None:
        if not any(isinstance(module, BatchNorm) for module in model.modules()):
            return None
        return "BatchNorm normalises over the samples of each rank, not over the whole batch (model.norm=group doesn't)"


def over_ranks(rig: Rig) -> Rig:
    """The rig of one rank, which has a slice of the logical batch: totals and losses are summed over all ranks."""

    buffers = RankBuffers(rig.model)

    def total(parts: list[Part]) -> Tensor:
        return data_ranks().sum(rig.total(parts))  # parts have all tokens of their samples

    def run(final: Rig, parts: list[Part], total: Tensor) -> Tensor:
        buffers.begin()
        loss = rig.run(final, parts, total)
        buffers.end(weight_among_ranks(parts))
        return target_ranks().sum(loss)

    return replace(rig, total=total, run=run)
