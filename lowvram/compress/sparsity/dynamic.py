"""sparsity=set and sparsity=rigl: dynamic sparse training. From the first step on a fixed number of weights is not 0;
now and then the smallest of them become 0, and as many others begin to grow from 0.

Mocanu et al., "Scalable Training of Artificial Neural Networks with Adaptive Sparse Connectivity Inspired by Network
Science" (SET, 2018); Evci et al., "Rigging the Lottery: Making All Tickets Winners" (RigL, 2020).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from lowvram.compat.torch_fake import is_fake
from lowvram.compress.sparsity.masks import Mask, Rule
from lowvram.compress.sparsity.selection import HIGHEST, Piece, ascending, choose_lowest, descending, rows_of
from lowvram.compress.sparsity.weights import Masked, check_every, check_share, check_time, step_at
from lowvram.config.errors import require
from lowvram.core.rounding import MOST_SEEDS, bits_at_random
from lowvram.core.seeds import seed_of

KeysOf = Callable[[Tensor, Tensor, int], Tensor]  # of some rows: values, which may not be chosen, the first's place


@dataclass(frozen=True)
class Dynamic(Masked):
    """The base of both: in each layer the masks move to other weights, fewer and fewer of them until `end`."""

    share: float = 0.8
    drop: float = 0.3
    end: float = 0.75
    every: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self.share)
        check_every(self.every)
        check_time("end", self.end)
        require(0 < self.drop <= 1, "sparsity.drop", self.drop, "above 0 and at most 1: the share of weights dropped")

    @property
    def final_share(self) -> float:
        return self.share

    def what_is_masked(self) -> str:
        return f"{self.share:.4g} of those in the masked layers from the first step on"


@final
@dataclass(frozen=True)
class Set(Dynamic):
    """Weights that grow are chosen at random."""

    def rule(self, masks: Sequence[Mask]) -> Rule:
        return AtRandom(masks, self)


@final
@dataclass(frozen=True)
class RigL(Dynamic):
    """Those weights grow whose gradients are the largest."""

    def rule(self, masks: Sequence[Mask]) -> Rule:
        return ByGradient(masks, self)


class Regrowth(Rule):
    """Moves the masks of one weight at a time, in its update."""

    def __init__(self, masks: Sequence[Mask], settings: Dynamic) -> None:
        super().__init__(masks)
        self.settings, self.end, self.seed = settings, step_at(settings.end, settings.num_steps), 0
        shapes = [mask.weight.shape for mask in masks]
        num_kept = sum(map(math.prod, shapes)) - round(settings.share * sum(map(math.prod, shapes)))
        self.num_kept = dict(zip((mask.name for mask in masks), kept_by_layer(shapes, num_kept), strict=True))

    def start(self, seed: int) -> None:
        self.seed = seed
        for mask in [mask for mask in self.masks if not is_fake(mask.masked)]:  # others have no values: it is a plan
            nobody = torch.zeros_like(mask.masked)
            num = mask.masked.numel() - self.num_kept[mask.name]
            mask.change(chosen(mask.masked, nobody, num, partial(random_keys, seed=f"{seed}:{mask.name}")))

    def is_due(self, step: int) -> bool:
        return 0 < step < self.end and step % self.settings.every == 0

    def num_moved(self, mask: Mask, step: int) -> int:
        """How many weights are dropped: a share of those that aren't masked, which falls along half a cosine."""
        share = self.settings.drop * 0.5 * (1 + math.cos(math.pi * step / self.end))
        num_kept = self.num_kept[mask.name]
        return min(int(share * num_kept), mask.masked.numel() - num_kept)

    def update(self, mask: Mask, weight: Tensor, gradient: Tensor, step: int) -> None:
        if self.is_due(step) and (num := self.num_moved(mask, step)):
            masked = mask.beside(weight)
            masked = masked | chosen(weight, masked, num, smallest)
            mask.change(masked ^ self.growing(mask, ~masked, gradient, num, step))

    @abstractmethod
    def growing(self, mask: Mask, stays: Tensor, gradient: Tensor, num: int, step: int) -> Tensor:
        """Which `num` elements of a weight grow (bool), none of which `stays`. Those just dropped may."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is none: what is drawn depends on the seed and the step."""


@final
class AtRandom(Regrowth):
    def growing(self, mask: Mask, stays: Tensor, gradient: Tensor, num: int, step: int) -> Tensor:
        return chosen(gradient, stays, num, partial(random_keys, seed=f"{self.seed}:{mask.name}:{step}"))


@final
class ByGradient(Regrowth):
    def needs_gradients(self, step: int) -> bool:
        return self.is_due(step)

    def growing(self, mask: Mask, stays: Tensor, gradient: Tensor, num: int, step: int) -> Tensor:
        return chosen(gradient, stays, num, largest)


def chosen(values: Tensor, barred: Tensor, num: int, keys_of: KeysOf) -> Tensor:
    """Which `num` elements of a tensor have the lowest keys (bool), without those that are barred."""
    result, place, pieces = torch.empty_like(barred), 0, list[Piece]()
    for rows, is_barred, is_chosen in rows_of(values, barred, result):
        pieces.append(Piece(partial(keys_of, rows, is_barred, place), is_chosen))
        place += rows.numel()
    choose_lowest(pieces, num)
    return result


def smallest(values: Tensor, barred: Tensor, place: int) -> Tensor:
    return ascending(values.abs()).masked_fill_(barred, HIGHEST)


def largest(values: Tensor, barred: Tensor, place: int) -> Tensor:
    return descending(values.abs()).masked_fill_(barred, HIGHEST)


def random_keys(values: Tensor, barred: Tensor, place: int, seed: str) -> Tensor:
    bits = bits_at_random(values.numel(), seed_of(seed) % MOST_SEEDS + place, values.device)
    return bits.view(values.shape).masked_fill_(barred, HIGHEST)


def kept_by_layer(shapes: Sequence[Sequence[int]], num_kept: int) -> list[int]:
    """How many elements of each weight aren't masked, `num_kept` in all: Erdős-Rényi-Kernel densities, proportional to
    the sum of the weight's sizes over their product, so that smaller layers are denser; at most 1."""
    sizes = [math.prod(shape) for shape in shapes]
    is_full = [False] * len(shapes)
    while True:
        left = num_kept - sum(size for size, full in zip(sizes, is_full, strict=True) if full)
        sums = [0 if full else sum(shape) for shape, full in zip(shapes, is_full, strict=True)]
        exact = [left * part / max(1, sum(sums)) for part in sums]  # density * size
        if not any(part > size for part, size in zip(exact, sizes, strict=True)):
            break
        is_full = [full or part > size for full, part, size in zip(is_full, exact, sizes, strict=True)]
    counts = [size if full else int(part) for size, full, part in zip(sizes, is_full, exact, strict=True)]
    rests = [0 if full else part - int(part) for full, part in zip(is_full, exact, strict=True)]
    for index in sorted(range(len(shapes)), key=lambda index: -rests[index])[: num_kept - sum(counts)]:
        counts[index] += 1
    return counts
