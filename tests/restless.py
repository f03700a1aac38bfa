"""Blocks that draw random numbers, change what they hold, or write in place, as those of other people's models do.

Each maps (samples, WIDTH) to the same shape. Tests take them from the tables at the end, in a `Net`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, CLASSES = 8, 5
GLOBAL_RANDOM = np.random.default_rng(0)  # as some files have one


class Net(nn.Module):
    """A stem, blocks, a head."""

    def __init__(self, block: Callable[[], nn.Module], num_blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Mlp(nn.Module):
    """A residual block; `between` is what others do in its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.between(torch.tanh(self.a(x))).tanh())


class FunctionalDropout(Mlp):
    def between(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.4, self.training)


class DropPath(Mlp):
    """Stochastic depth for each sample, as in timm."""

    def between(self, x: Tensor) -> Tensor:
        return x * torch.bernoulli(torch.full_like(x[:, :1], 0.5)) * 2 if self.training else x


class Noise(Mlp):
    def between(self, x: Tensor) -> Tensor:
        return x * (1 + 0.5 * torch.randn_like(x))


class RandomRelu(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.RReLU()

    def between(self, x: Tensor) -> Tensor:
        return self.relu(x)


class AttentionDropout(Mlp):
    """nn.MultiheadAttention's own dropout, which is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH // 2, 2, dropout=0.4, batch_first=True)

    def between(self, x: Tensor) -> Tensor:
        tokens = x.view(len(x), 2, -1)
        return self.attention(tokens, tokens, tokens, need_weights=False)[0].flatten(1)


class FusedDropout(Mlp):
    def between(self, x: Tensor) -> Tensor:
        tokens = x.view(len(x), 1, 4, -1)
        return F.scaled_dot_product_attention(tokens, tokens, tokens, dropout_p=0.4).flatten(1)


class NumpyScale(Mlp):
    """One normal number: numpy draws two at a time, and keeps the second in reserve."""

    def between(self, x: Tensor) -> Tensor:
        return x * float(np.random.randn())


class NumpyMask(Mlp):
    def between(self, x: Tensor) -> Tensor:
        return x * torch.from_numpy((np.random.rand(*x.shape) < 0.7).astype(np.float64)).to(x)


class PythonScale(Mlp):
    def between(self, x: Tensor) -> Tensor:
        return x * random.random()


class PythonNormal(Mlp):
    def between(self, x: Tensor) -> Tensor:
        return x * random.gauss(1, 0.5)


class PythonSkip(Mlp):
    """A block that is now and then skipped."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.9 if self.training and random.random() < 0.5 else super().forward(x)


class OwnGenerator(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.draws = torch.Generator().manual_seed(3)

    def between(self, x: Tensor) -> Tensor:
        return x * torch.rand(x.shape, generator=self.draws, dtype=x.dtype)


class OwnNumpy(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.draws = np.random.default_rng(3)

    def between(self, x: Tensor) -> Tensor:
        return x * self.draws.normal()


class OwnPython(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.draws = random.Random(3)

    def between(self, x: Tensor) -> Tensor:
        return x * self.draws.uniform(0.5, 1)


class GlobalNumpy(Mlp):
    def between(self, x: Tensor) -> Tensor:
        return x * GLOBAL_RANDOM.normal()


class SometimesDrops(Mlp):
    """Every second time alone."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def between(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return F.dropout(x, 0.4) if self.num_calls % 2 == 0 else x


class InstanceNorm(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(2, track_running_stats=True, affine=True)

    def between(self, x: Tensor) -> Tensor:
        return self.norm(x.view(len(x), 2, -1)).flatten(1)


class CumulativeNorm(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None)

    def between(self, x: Tensor) -> Tensor:
        return self.norm(x)


class OwnNorm(Mlp):
    """A batch norm of one's own, which reads its running mean in training, too."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def between(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)  # another tensor
        return x - self.mean


class Ema(Mlp):
    """Codes that follow what passes, as in vector quantisation."""

    codes: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def between(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.codes.mul_(0.9).add_(0.1 * x.mean(0))
                self.count += 1
        return x * (1 + self.codes)


class WrittenThroughData(Mlp):
    """Its buffer's version doesn't tell that it was changed."""

    level: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.ones(WIDTH))

    def between(self, x: Tensor) -> Tensor:
        if self.training:
            self.level.data.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x * self.level.clone()


class LargeEma(Mlp):
    """The same in a buffer that is too large to be copied for nothing."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(2**15 + 1, WIDTH))

    def between(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.codes.mul_(0.9).add_(0.1 * x.mean(0))
        return x * (1 + self.codes[7])


class Spectral(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.spectral_norm(self.a)


class OldSpectral(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.spectral_norm(self.a)


class Counter(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def between(self, x: Tensor) -> Tensor:
        self.steps += 1
        return x / self.steps


class NestedState(Mlp):
    """What changes lies in a list in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, Any] = {"scales": [1.0]}

    def between(self, x: Tensor) -> Tensor:
        self.state["scales"].append(self.state["scales"][-1] * 0.9)
        return x * self.state["scales"][-1]


class PlainTensor(Mlp):
    """A tensor that is no buffer, written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.level = torch.ones(())

    def between(self, x: Tensor) -> Tensor:
        self.level.mul_(0.9)
        return x * self.level.item()


class TensorInList(Mlp):
    """The same in a list of an object."""

    def __init__(self) -> None:
        super().__init__()
        self.state = SimpleNamespace(levels=[torch.ones(())])

    def between(self, x: Tensor) -> Tensor:
        self.state.levels[0].mul_(0.9)
        return x * self.state.levels[0]


class CountingArray(Mlp):
    """Counts in an array of numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = np.zeros(3)

    def between(self, x: Tensor) -> Tensor:
        self.counts[1] += 1
        return x / float(self.counts[1])


class CountingInTuple(Mlp):
    """Counts in a list in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.held = ("scales", [1.0])

    def between(self, x: Tensor) -> Tensor:
        self.held[1].append(self.held[1][-1] * 0.9)
        return x * self.held[1][-1]


class Sharing(Mlp):
    """Every second block reads what the one before it has left in an object that all blocks hold."""

    made: ClassVar[list[Sharing]] = []

    def __init__(self) -> None:
        super().__init__()
        number = len(self.made) % 4  # in a Net
        self.is_writing, self.shared = number % 2 == 0, self.made[-1].shared if number else SimpleNamespace(kv=None)
        self.made.append(self)

    def between(self, x: Tensor) -> Tensor:
        if self.is_writing:
            self.shared.kv = torch.tanh(x)
        return x * self.shared.kv


class Recurrent(nn.Module):
    """Three steps of torch's recurrent layers."""

    def __init__(self, kind: Callable[..., nn.Module], num_directions: int = 1) -> None:
        super().__init__()
        more = {"bidirectional": True} if num_directions == 2 else {}
        self.layer = kind(WIDTH, WIDTH // num_directions, batch_first=True, **more)
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.layer(x[:, None].expand(-1, 3, -1))[0][:, -1])


class RecurrentNorm(nn.Module):
    """torch.compile leaves the recurrent layer to Python, and with it the block."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.layer(x[:, None])[0][:, 0])


class Cell(nn.Module):
    """Three steps of torch's recurrent cells."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.cell, self.a = kind(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for _ in range(3):
            state = self.cell(x, state)
        return x + self.a(state[0] if isinstance(state, tuple) else state)


class ReluInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.1, inplace=True), nn.Linear(WIDTH, WIDTH), nn.ELU(inplace=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class ConvolutionInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(2, 2, 3, padding=1), nn.Conv1d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.leaky_relu(self.a(x.view(len(x), 2, -1)), 0.2, inplace=True)
        return F.leaky_relu(self.b(h), 0.2, inplace=True).flatten(1)


class AddInPlace(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h += self.more
        return torch.tanh(self.b(h.tanh()))


class UnsafeChunks(Mlp):
    """Writes through views that don't share the version of the product."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.a(x).unsafe_chunk(2, -1)
        return x + self.b(gate.sigmoid_() * value.tanh_())


class WrittenAfterwards(Mlp):
    """Returns a product, into which the model writes: see `WritingNet`."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


DRAWING: dict[str, Callable[[], nn.Module]] = {
    each.__name__: each
    for each in (
        *(FunctionalDropout, DropPath, Noise, RandomRelu, AttentionDropout, FusedDropout, NumpyScale, NumpyMask),
        *(PythonScale, PythonNormal, PythonSkip, OwnGenerator, OwnNumpy, OwnPython, GlobalNumpy, SometimesDrops),
    )
}
CHANGING: dict[str, Callable[[], nn.Module]] = {
    each.__name__: each
    for each in (
        *(
            InstanceNorm,
            CumulativeNorm,
            OwnNorm,
            Ema,
            WrittenThroughData,
            LargeEma,
            Spectral,
            OldSpectral,
            Counter,
            NestedState,
        ),
        *(PlainTensor, TensorInList, SometimesDrops, CountingArray, CountingInTuple),
    )
}
WRITING: dict[str, Callable[[], nn.Module]] = {
    "Gru": lambda: Recurrent(nn.GRU),
    "BidirectionalGru": lambda: Recurrent(nn.GRU, 2),
    "Lstm": lambda: Recurrent(nn.LSTM),
    "Rnn": lambda: Recurrent(nn.RNN),
    "RecurrentNorm": RecurrentNorm,
    "Sharing": Sharing,
    "GruCell": lambda: Cell(nn.GRUCell),
    "LstmCell": lambda: Cell(nn.LSTMCell),
    "RnnCell": lambda: Cell(nn.RNNCell),
    **{each.__name__: each for each in (ReluInPlace, ConvolutionInPlace, AddInPlace, UnsafeChunks)},
}
BLOCKS = {**DRAWING, **CHANGING, **WRITING}
