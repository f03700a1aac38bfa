"""Code such as users write: a model, data, a loss, an optimizer, a score and a callback, for trials to name."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

WIDTH, CLASSES = 6, 3


class Points(Dataset[tuple[Tensor, int]]):
    """Points and in which third they lie, with noise of three generators, new each time."""

    def __init__(self, num_samples: int, first: int) -> None:
        generator = torch.Generator().manual_seed(first)
        self.x = torch.randn(num_samples, WIDTH, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x = self.x[index]
        noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
        return x + 0.01 * noise, int(x.sum().clamp(-1, 1).round()) + 1


def points() -> tuple[Points, Points]:
    return Points(24, 0), Points(8, 1)


class Block(nn.Module):
    """Batch norm, whose statistics are buffers, and dropout that isn't a module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.linear(self.norm(x)).relu(), 0.2, self.training)


class Net(nn.Module):
    """Blocks with a shared one, a parameter without use, and a buffer that isn't saved."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head, self.unused = nn.Linear(WIDTH, CLASSES), nn.Parameter(torch.ones(2))
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.head(x) * self.scale


class Drawing(Net):
    """Also draws from generators that aren't torch's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1 + 0.1 * random.random()) + 0.1 * float(np.random.rand()))


class Freezing(Net):
    """Stops training a block after some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_calls += 1
        self.blocks[1].requires_grad_(int(self.num_calls) < 3)
        return super().forward(x)


class Smoothed:
    """A loss of the user's."""

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, label_smoothing=0.1, reduction="sum")


class Momentum(torch.optim.Optimizer):
    """SGD with momentum, whose state and groups hold values of several kinds."""

    def __init__(self, params: Any, lr: float = 0.1, betas: tuple[float, ...] = (0.9,)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "kind": "plain", "history": [1, 2.5, None]})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                state["last"] = [float(parameter.grad.sum()), "sum"]
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                mean.mul_(group["betas"][0]).add_(parameter.grad)
                parameter.sub_(group["lr"] * mean)


class Diary:
    """A callback that writes beside the run's folder, as its own file."""

    def __init__(self) -> None:
        self.path = Path("diary.txt")

    def step(self, step: int, values: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(f"{step}\n")


def surest(outputs: Tensor, targets: Tensor) -> float:
    """A score: the mean of the largest probability."""
    return float(outputs.softmax(-1).amax(-1).mean())
