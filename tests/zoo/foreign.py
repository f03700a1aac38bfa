"""What the zoo knows of each model: how it is made, data for it, its loss, and what is expected of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, CLASSES = 13, 5
Draw = Callable[[int], Any]  # number of samples -> tensors, from torch's generator, in its default format


def sum_of_cross_entropies(model: nn.Module, outputs: Any, targets: Tensor) -> Tensor:
    """Of logits (..., classes), or of the first of several outputs."""
    del model
    logits = outputs[0] if isinstance(outputs, tuple) else outputs
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")


def sum_of_squares(model: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
    del model
    return (outputs - targets).square().sum()


def floats(*shape: int) -> Draw:
    return lambda num_samples: torch.randn(num_samples, *shape)


def tokens(length: int) -> Draw:
    return lambda num_samples: torch.randint(VOCABULARY, (num_samples, length))


def labels(num_samples: int) -> Tensor:
    return torch.randint(CLASSES, (num_samples,))


def named(**draws: Draw) -> Draw:
    """A dictionary of inputs, passed as keyword arguments."""
    return lambda num_samples: {name: draw(num_samples) for name, draw in draws.items()}


@dataclass(frozen=True, kw_only=True, eq=False)
class Foreign:
    """A model with data, as its author uses it."""

    make: Callable[[], nn.Module]
    inputs: Draw
    targets: Draw = labels
    # model, outputs, targets -> the sum of the losses; None: cross-entropy, which lowvram.task takes by default
    criterion: Callable[[nn.Module, Any, Any], Tensor] | None = None
    draws: bool = False  # random numbers in its forward pass
    lacks: str = ""  # the names of the facts that it lacks, apart from those that every module of the user's own lacks
    has_causal_blocks: bool = False  # if it computes each sample from that sample alone
    refuses: str = ""  # other options, or groups, that it can't have: the knob or the first step says so

    @property
    def absent(self) -> set[str]:
        lacks = {"EXITS", "HEAD", *self.lacks.split()}
        return lacks if self.has_causal_blocks or "SEPARATE_SAMPLES" in lacks else {"CAUSAL_BLOCKS", *lacks}

    def loss(self, model: nn.Module, outputs: Any, targets: Any) -> Tensor:
        return (self.criterion or sum_of_cross_entropies)(model, outputs, targets)
