"""Muon: the update of a weight matrix is its orthogonalized momentum, so that all directions change equally.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). Updates are scaled to the size of
AdamW's, so that both share a learning rate, as in Liu et al., "Muon is Scalable for LLM Training" (2025). The update is
torch.optim's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from lowvram.config.errors import require
from lowvram.knobs.optimizer.groups import check_share
from lowvram.knobs.optimizer.matrices import MatrixKnob


@dataclass(frozen=True)
class Muon(MatrixKnob):
    """One momentum per hidden matrix; AdamW for all other parameters, convolutions too."""

    momentum: float = 0.95
    nesterov: bool = True
    iterations: int = 5

    rule = "muon"
    layers = (nn.Linear,)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("momentum", self.momentum)
        require(1 <= self.iterations < 100, "optimizer.iterations", self.iterations, "at least 1 and below 100")

    def of_matrices(self, matrices: Mapping[nn.Parameter, int]) -> torch.optim.Optimizer:
        return torch.optim.Muon(
            matrices,
            self.lr,
            self.weight_decay,
            self.momentum,
            self.nesterov,
            ns_steps=self.iterations,
            adjust_lr_fn="match_rms_adamw",
        )
