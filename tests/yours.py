"""What users may have written: data and losses of their own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset


class Listed(Dataset[Any]):
    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class Noisy(Listed):
    """Random in every way, and new each time."""

    def __getitem__(self, index: int) -> Any:
        return torch.rand(2), [random.random(), np.random.rand()]


def curve(num_samples: int = 64) -> tuple[TensorDataset, TensorDataset]:
    """The sum of four numbers, and their mean: nothing with classes."""
    x = torch.linspace(-1, 1, 4 * num_samples).view(num_samples, 4).roll(3, 1)
    y = torch.stack([x.sum(1), x.mean(1)], 1)
    return TensorDataset(x, y), TensorDataset(x[::4], y[::4])


def listed(samples: list[Any], held_out: list[Any] | None = None) -> tuple[Listed, Listed]:
    return Listed(samples), Listed(samples if held_out is None else held_out)


def noisy() -> tuple[Noisy, Noisy]:
    return Noisy([0] * 5), Noisy([0] * 5)


class Endless(IterableDataset[Any]):
    """Numbers and their sums, with noise, for ever."""

    def __iter__(self) -> Iterator[Any]:
        for number in count():
            x = torch.tensor([number % 7, number % 3, number % 2, 1.0])
            yield x, torch.stack([x.sum(), x.mean()]) + 0.01 * torch.rand(2)


class Shuffled:
    """Seven samples in another order each epoch, as an iterable data set of the library datasets."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = list(range(7))
        random.Random(self.epoch).shuffle(order)
        return ((torch.tensor([float(index)]), torch.tensor([0.5])) for index in order)


class Drawn:
    """Seven samples in an order that is drawn as soon as reading begins."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.tensor([float(index)]), torch.tensor([0.5])) for index in random.sample(range(7), 7)])


class NoScore:
    def update(self, outputs: Tensor, targets: Tensor) -> None: ...

    def compute(self) -> None: ...


class Buffered(nn.Module):
    """A score that counts parts in a buffer, as those of torchmetrics do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.seen += 1

    def compute(self) -> Tensor:
        return self.seen


def endless() -> tuple[Endless, Endless]:
    return Endless(), Endless()


def nothing() -> None: ...


def line() -> nn.Module:
    return nn.Linear(4, 2)


class Looking(nn.Module):
    """A language model that looks at its numbers: it can't be planned."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(x if x.mean().item() > 0 else -x)


class Recurrent(nn.Module):
    """A language model that reads from left to right."""

    def __init__(self, vocab_size: int, width: int = 64) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)
        self.layers = nn.LSTM(width, width, num_layers=2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens))[0])


class Stack(nn.Module):
    """Three blocks in a list."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab_size, 32), nn.Linear(32, vocab_size)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.GELU()) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = h + layer(h)
        return self.head(h)


class Regression:
    """Squares of differences, twice as many targets as samples."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.factor * F.mse_loss(outputs, targets, reduction="sum")


class Everything(Regression):
    def count(self, targets: Tensor) -> int:
        return 7 * len(targets)

    def num_correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).abs().lt(0.5).sum()

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return [next(model.children())]

    def head(self, model: nn.Module) -> nn.Linear | None:
        return None


class BlocksElsewhere(Regression):
    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return [nn.Linear(2, 2)]


class TwoHeads(nn.Module):
    """One class and two numbers of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.kind, self.sizes = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        hidden = self.body(inputs).relu()
        return {"kind": self.kind(hidden), "sizes": self.sizes(hidden)}


class TwoLosses:
    def criterion(self, outputs: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
        differences = F.mse_loss(outputs["sizes"], targets["sizes"], reduction="sum")
        return F.cross_entropy(outputs["kind"], targets["kind"], reduction="sum") + differences


def two_targets(num_samples: int = 64) -> tuple[Listed, Listed]:
    """Samples whose targets are a dictionary."""
    inputs = torch.linspace(-1, 1, 4 * num_samples).view(num_samples, 4).roll(3, 1)
    targets = [{"kind": int(x.argmax()) % 3, "sizes": [float(x.sum()), float(x.mean())]} for x in inputs]
    return listed(list(zip(inputs, targets, strict=True)))


class LateMistake(Regression):
    """Forgets to sum after some steps."""

    num_calls = 0

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.num_calls += 1
        loss = super().criterion(outputs, targets)
        return loss if self.num_calls <= 5 else loss[None]


class Mean:
    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets) ** 2


def rightness(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of right classes of each sample."""
    return (outputs.argmax(-1) == targets).double().flatten(1).mean(1)


def mean_rightness(outputs: Tensor, targets: Tensor) -> float:
    return float(rightness(outputs, targets).mean())


class Largest:
    """The largest output, over all parts."""

    def __init__(self) -> None:
        self.value = float("-inf")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.value = max(self.value, float(outputs.max()))

    def compute(self) -> float:
        return self.value


def no_number(outputs: Tensor, targets: Tensor) -> str:
    return "good"


class Diary:
    """Writes down every moment, in the working directory."""

    def write(self, line: str) -> None:
        with Path("diary.txt").open("a") as file:
            file.write(f"{line}\n")

    def begin(self, config: dict[str, Any], step: int) -> None:
        self.write(f"begin {step} {config['train']['steps']}")

    def step(self, step: int, values: dict[str, Any]) -> None:
        self.write(f"step {step} {next(name for name in values if name.startswith('loss'))}")
        values.clear()  # a copy

    def evaluation(self, step: int, values: dict[str, Any]) -> None:
        self.write(f"evaluation {step} {sorted(values)}")

    def snapshot(self, step: int, folder: Path) -> None:
        self.write(f"snapshot {step} {folder.exists()}")

    def end(self, row: dict[str, Any]) -> None:
        self.write(f"end {row['status']}")


class Failing:
    """Works until its second step."""

    def step(self, step: int, values: dict[str, Any]) -> None:
        if step == 2:
            raise RuntimeError("no more ink\nat all")


def spoiling(outputs: Tensor, targets: Tensor) -> float:
    """A score that changes what it gets, and leaves autocast on."""
    torch.autocast("cpu", torch.bfloat16).__enter__()
    outputs.zero_()
    targets.fill_(1)
    return 0.0


class Spoiling:
    """The same as an object."""

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        spoiling(outputs, targets)

    def compute(self) -> float:
        torch.autocast("cpu", torch.bfloat16).__enter__()
        return 0.0
