"""Models of sequences and of steps in time, as their authors wrote them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.foreign import CLASSES, VOCABULARY, Foreign, floats, sum_of_squares, tokens

WIDTH, LENGTH = 6, 5


class Layer(nn.Module):
    """One of torch's recurrent layers, with a norm and a shortcut."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.rnn, self.norm = kind(WIDTH, WIDTH, batch_first=True), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.rnn(x)[0])


class Stack(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(3))

    def forward(self, idx: Tensor) -> Tensor:
        x = self.embed(idx)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Bidirectional(nn.Module):
    """A deep LSTM in one module, both ways, with dropout between its layers."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, bidirectional=True, dropout=dropout, batch_first=True)
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, idx: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(self.embed(idx))
        return self.head(torch.cat([hidden[-2], hidden[-1]], dim=-1))


class Cells(nn.Module):
    """A loop over time around cells, as written before torch had layers for it; packs what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.RNNCell(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)])
        self.readout = nn.Linear(WIDTH, WIDTH)

    def forward(self, series: Tensor) -> Tensor:
        states = [torch.zeros(len(series), WIDTH, dtype=series.dtype, device=series.device) for _ in self.cells]
        outputs = []
        for x in series.unbind(1):
            for index, cell in enumerate(self.cells):
                states[index] = x = cell(x, states[index])
            outputs.append(self.readout(x))
        return torch.stack(outputs, 1)


class TemporalBlock(nn.Module):
    """Causal convolutions with the old weight norm."""

    def __init__(self, dilation: int) -> None:
        super().__init__()
        self.padding = 2 * dilation
        conv = lambda: nn.utils.weight_norm(nn.Conv1d(WIDTH, WIDTH, 3, dilation=dilation))  # noqa: E731
        self.conv1, self.conv2, self.dropout = conv(), conv(), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.dropout(F.elu(self.conv1(F.pad(x, (self.padding, 0)))))
        out = self.dropout(F.elu(self.conv2(F.pad(out, (self.padding, 0)))))
        return F.elu(out + x)


class Tcn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(*(TemporalBlock(2**i) for i in range(3)))
        self.linear = nn.Linear(WIDTH, CLASSES)

    def forward(self, series: Tensor) -> Tensor:
        return self.linear(self.network(series.transpose(1, 2))[:, :, -1])


class NewWeightNorm(nn.Module):
    """The same norm as a parametrization."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.layers = nn.ModuleList(nn.Sequential(norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class VectorField(nn.Module):
    """Counts how often it is asked, as solvers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.nfe = nn.Sequential(nn.Linear(WIDTH + 1, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), 0

    def forward(self, t: float, y: Tensor) -> Tensor:
        self.nfe += 1
        return self.net(torch.cat([y, torch.full_like(y[:, :1], t)], 1))


class NeuralOde(nn.Module):
    """Five steps of Runge and Kutta around one small network."""

    def __init__(self) -> None:
        super().__init__()
        self.field, self.head = VectorField(), nn.Linear(WIDTH, WIDTH)

    def forward(self, y: Tensor) -> Tensor:
        h = 0.2
        for step in range(5):
            t = step * h
            k1 = self.field(t, y)
            k2 = self.field(t + h / 2, y + h / 2 * k1)
            k3 = self.field(t + h / 2, y + h / 2 * k2)
            k4 = self.field(t + h, y + h * k3)
            y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return self.head(y)


class DeepEquilibrium(nn.Module):
    """A fixed point that is found without a graph, with a hook that solves for its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        with torch.no_grad():
            self.cell.weight.mul_(0.3)

    def f(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.cell(z) + x)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(20):
                z = self.f(z, x)
        z = self.f(z, x)
        if z.requires_grad:
            z0 = z.detach().requires_grad_()
            f0 = self.f(z0, x.detach())

            def solve(grad: Tensor) -> Tensor:
                found = grad
                for _ in range(20):
                    found = torch.autograd.grad(f0, z0, found, retain_graph=True)[0] + grad
                return found

            z.register_hook(solve)
        return self.head(z)


series = partial(Foreign, inputs=floats(LENGTH, WIDTH))
text = partial(Foreign, inputs=tokens(LENGTH), targets=tokens(LENGTH))
MODELS = {
    "gru": text(
        make=lambda: Stack(nn.GRU),
        lacks="INNER_LINEARS INNER_PRODUCTS MLPS",
        refuses="adapter=lora adapter=qlora sparsity",
    ),
    "lstm": text(
        make=lambda: Stack(nn.LSTM),
        lacks="INNER_LINEARS INNER_PRODUCTS MLPS",
        refuses="adapter=lora adapter=qlora sparsity",
    ),
    "bidirectional": Foreign(
        make=lambda: Bidirectional(0.3),
        inputs=tokens(LENGTH),
        draws=True,
        lacks="BLOCKS BRANCHES INNER_LINEARS INNER_PRODUCTS MLPS NORMS NO_RANDOMNESS SEPARATE_SAMPLES SKIPPABLE",
    ),
    "cells": series(
        make=Cells,
        targets=floats(LENGTH, WIDTH),
        criterion=sum_of_squares,
        lacks="BLOCKS BRANCHES INNER_LINEARS INNER_PRODUCTS MLPS NORMS SEPARATE_SAMPLES SKIPPABLE",
    ),
    "tcn": series(
        make=Tcn,
        draws=True,
        lacks="INNER_LINEARS INNER_PRODUCTS MLPS NORMS NO_RANDOMNESS SEPARATE_SAMPLES",
        refuses="adapter=lora adapter=qlora sparsity compile=torchscript",
    ),
    "weight_norm": Foreign(
        make=NewWeightNorm,
        inputs=floats(WIDTH),
        lacks="INNER_LINEARS INNER_PRODUCTS MLPS NORMS SEPARATE_SAMPLES",
        refuses="adapter=lora adapter=qlora sparsity",
    ),
    "neural_ode": Foreign(
        make=NeuralOde,
        inputs=floats(WIDTH),
        targets=floats(WIDTH),
        criterion=sum_of_squares,
        lacks="MLPS NORMS PLAIN_BLOCKS SKIPPABLE",
        refuses="tile=blocks sparsity=two_of_four",
    ),
    "deep_equilibrium": Foreign(
        make=DeepEquilibrium,
        inputs=floats(WIDTH),
        lacks="BLOCKS BRANCHES MLPS NORMS SEPARATE_SAMPLES SKIPPABLE",
        refuses="compile=model",
    ),
}
