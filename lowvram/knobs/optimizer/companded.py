"""AdamW, SGD and Muon whose states are kept in 8 bits between steps (`companding`). The updates are torch.optim's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import final

import torch
from torch import nn

from lowvram.config.errors import require
from lowvram.core.fact import Fact
from lowvram.core.kind import Kind
from lowvram.core.knob import Exactness
from lowvram.knobs.optimizer.companding import Companded, Root, Softsign
from lowvram.knobs.optimizer.fp32_compute import RoundingPolicy, with_fp32_compute
from lowvram.knobs.optimizer.groups import AdamKnob
from lowvram.knobs.optimizer.muon import Muon
from lowvram.knobs.optimizer.plain import MOMENTUM, SGD, AdamW
from lowvram.knobs.optimizer.state_formats import StateFormat

PIECE_ELEMENTS = 2**21  # of a parameter that are updated at a time: 8 MiB for each copy in fp32
BAND = 2e-6  # of gradients at the same weights, which an optimizer doesn't touch
NEEDS = frozenset({Fact.KERNEL_COMPILER, Fact.WHOLE_UPDATES})  # a block of codes must lie on one rank
FORMATS: Mapping[str, StateFormat] = {
    "exp_avg": Companded(Softsign),
    "exp_avg_sq": Companded(Root),
    MOMENTUM: Companded(Softsign),
}


@final
@dataclass(frozen=True)
class AdamWCompanded(AdamKnob):
    """Two moments of 8 bits per parameter."""

    exactness = Exactness.LOSSY
    band = BAND
    saves = Kind.OPTIMIZER
    needs_always = NEEDS
    remedy = (Kind.OPTIMIZER, 15)

    def reference(self) -> AdamW:
        return AdamW(**asdict(self))

    def make(self, parameters: list[nn.Parameter], policy: RoundingPolicy | None = None) -> torch.optim.Optimizer:
        return with_fp32_compute(self.adamw(parameters), policy or RoundingPolicy(), FORMATS, PIECE_ELEMENTS)


@final
@dataclass(frozen=True)
class SGDCompanded(SGD):
    """One momentum of 8 bits per parameter."""

    exactness = Exactness.LOSSY
    band = BAND
    formats = FORMATS
    needs_always = NEEDS

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.momentum > 0, "optimizer.momentum", self.momentum, "above 0: without it use optimizer=sgd")

    def reference(self) -> SGD:
        return SGD(**asdict(self))


@final
@dataclass(frozen=True)
class MuonCompanded(Muon):
    """One momentum of 8 bits per hidden matrix, and AdamW's moments in 8 bits for all other parameters."""

    exactness = Exactness.LOSSY
    band = BAND
    saves = Kind.OPTIMIZER
    formats = FORMATS
    needs_always = NEEDS

    def reference(self) -> Muon:
        return Muon(**asdict(self))
