"""sparsity=magnitude and sparsity=movement: a growing share of the weights becomes 0, one threshold for all layers.

Zhu and Gupta, "To Prune, or Not to Prune: Exploring the Efficacy of Pruning for Model Compression" (2018): the cubic
schedule. Sanh et al., "Movement Pruning: Adaptive Sparsity by Fine-Tuning" (2020).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from lowvram.compress.sparsity.masks import Mask, Rule
from lowvram.compress.sparsity.selection import LOWEST, Piece, ascending, choose_lowest, rows_of
from lowvram.compress.sparsity.weights import Masked, check_every, check_share, check_time, step_at
from lowvram.config.errors import require
from lowvram.core.kind import Kind
from lowvram.core.ledger import announce


@dataclass(frozen=True)
class Schedule:
    """The share of weights that are masked from each step on: 0 at `begin`, most of it soon after, `share` at `end`."""

    share: float
    begin: int  # steps
    end: int
    every: int

    def is_due(self, step: int) -> bool:
        return step == self.end or (self.begin <= step < self.end and (step - self.begin) % self.every == 0)

    def share_at(self, step: int) -> float:
        left = (self.end - step) / max(1, self.end - self.begin)
        return self.share * (1 - left**3)


@dataclass(frozen=True)
class Gradual(Masked):
    """The base of both: from `begin` to `end` the weights with the lowest scores of all layers become 0, and stay 0."""

    share: float = 0.5
    begin: float = 0.25
    end: float = 0.75
    every: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self.share)
        check_every(self.every)
        check_time("begin", self.begin)
        check_time("end", self.end)
        require(self.begin <= self.end, "sparsity.begin", self.begin, f"at most sparsity.end={self.end:g}")

    @property
    def final_share(self) -> float:
        return self.share

    def what_is_masked(self) -> str:
        return f"{self.share:.4g} of those in the masked layers from {self.end:.4g} of the steps on, fewer before"

    @property
    def schedule(self) -> Schedule:
        begin, end = (step_at(share, self.num_steps) for share in (self.begin, self.end))
        return Schedule(self.share, begin, end, self.every)


@final
@dataclass(frozen=True)
class Magnitude(Gradual):
    """The smallest weights become 0."""

    def rule(self, masks: Sequence[Mask]) -> Rule:
        return Smallest(masks, self.schedule)


@final
@dataclass(frozen=True)
class Movement(Gradual):
    """Those weights become 0 that training moves towards 0, whatever their size: for fine-tuning."""

    def rule(self, masks: Sequence[Mask]) -> Rule:
        return MovedToZero(masks, self.schedule)


class Threshold(Rule):
    """Masks the weights with the lowest keys of all layers. Those that are masked have the lowest of all."""

    def __init__(self, masks: Sequence[Mask], schedule: Schedule) -> None:
        super().__init__(masks)
        self.schedule = schedule

    def begin(self, step: int) -> None:
        if self.schedule.is_due(step):
            pieces = [
                Piece(partial(self.keys, values, masked), masked)
                for mask in self.masks
                for values, masked in rows_of(self.scores(mask), mask.masked)
            ]
            choose_lowest(pieces, self.num_at(step))
            for mask in self.masks:
                mask.is_new = True

    def num_at(self, step: int) -> Tensor:
        """How many weights are masked from this step on (0-dim): those of the schedule, but never fewer than are masked
        now. In a resumed run that has become longer the schedule says fewer at first."""
        total = sum(mask.weight.numel() for mask in self.masks)
        counts = [rows.sum() for mask in self.masks for (rows,) in rows_of(mask.masked)]
        return torch.stack(counts).sum().clamp(min=round(self.schedule.share_at(step) * total))

    @abstractmethod
    def scores(self, mask: Mask) -> Tensor:
        """What the keys of a weight's elements are made of."""

    @abstractmethod
    def keys(self, values: Tensor, masked: Tensor) -> Tensor:
        """The keys of some rows."""


@final
class Smallest(Threshold):
    """By the size of weights."""

    def scores(self, mask: Mask) -> Tensor:
        return mask.weight.detach()

    def keys(self, values: Tensor, masked: Tensor) -> Tensor:
        return ascending(values.abs()).masked_fill_(masked, LOWEST)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is none."""


@final
class MovedToZero(Threshold):
    """By the sum of -weight * gradient over the steps, in fp32: 4 bytes a weight. It is low where updates make a weight
    smaller."""

    def __init__(self, masks: Sequence[Mask], schedule: Schedule) -> None:
        super().__init__(masks, schedule)
        zeros = partial(torch.zeros_like, dtype=torch.float32, requires_grad=False)
        self.sums = {mask.name: announce(zeros(mask.weight), Kind.OPTIMIZER) for mask in masks}

    def update(self, mask: Mask, weight: Tensor, gradient: Tensor, step: int) -> None:
        for total, *factors in rows_of(self.sums[mask.name], weight, gradient):
            weights, gradients = (rows.to(total.device, torch.float32) for rows in factors)
            total.addcmul_(weights, gradients, value=-1)

    def scores(self, mask: Mask) -> Tensor:
        return self.sums[mask.name]

    def keys(self, values: Tensor, masked: Tensor) -> Tensor:
        return ascending(values).masked_fill_(masked, LOWEST)

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, total in self.sums.items():
            total.copy_(state["sums"][name])
