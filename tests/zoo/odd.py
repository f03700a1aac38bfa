"""Models that do what few others do: with graphs, complex numbers, ties, hooks, counters, generators of their own."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.foreign import CLASSES, Foreign, floats, named, sum_of_cross_entropies, sum_of_squares

WIDTH, NODES = 6, 5


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(x)))


class MessagePassing(nn.Module):
    """Adds up what comes along the edges of a graph that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        messages = torch.tanh(self.message(torch.cat([x[:, source], x[:, target]], -1)))
        received = torch.zeros_like(x).index_add(1, target, messages)
        return x + self.update(torch.cat([x, received], -1))


class Graph(nn.Module):
    edge_index: Tensor

    def __init__(self) -> None:
        super().__init__()
        edges = [[0, 1, 2, 3, 4, 0, 2], [1, 2, 3, 4, 0, 2, 0]]
        self.register_buffer("edge_index", torch.tensor(edges), persistent=False)
        self.layers = nn.ModuleList(MessagePassing() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.edge_index)
        return self.head(x.mean(1))


class SpectralConv(nn.Module):
    """Multiplies the lowest frequencies by complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(2, 2, 3, dtype=torch.complex64) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x)
        low = torch.einsum("bix,iox->box", spectrum[:, :, :3], self.weights.to(spectrum.dtype))
        return torch.fft.irfft(F.pad(low, (0, spectrum.shape[-1] - 3)), n=x.size(-1))


class FourierLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.w = SpectralConv(), nn.Conv1d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.conv(x) + self.w(x))


class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.project = nn.Conv1d(1, 2, 1), nn.Conv1d(2, 1, 1)
        self.layers = nn.ModuleList(FourierLayer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x[:, None])
        for layer in self.layers:
            x = layer(x)
        return self.project(x)[:, 0]


class TiedByMemory(nn.Module):
    """The decoder's weight is a view of the encoder's: two parameters, one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks, self.head = nn.ModuleList(Residual() for _ in range(2)), nn.Linear(WIDTH, CLASSES)
        self.dec.weight.data = self.enc.weight.data.t()

    def forward(self, x: Tensor) -> Tensor:
        x = self.enc(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.dec(x))


class TiedBlocks(nn.Module):
    """All blocks have the same first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Residual() for _ in range(3)), nn.Linear(WIDTH, CLASSES)
        for block in self.blocks[1:]:
            block.up = self.blocks[0].up

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class LowRank(nn.Module):
    """A frozen layer, and two small matrices that train."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) * 0.3)
        self.lora_b = nn.Parameter(torch.randn(base.out_features, rank) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.lora_a.t() @ self.lora_b.t()


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks, self.head = nn.ModuleList(Residual() for _ in range(3)), nn.Linear(WIDTH, CLASSES)
        for block in self.blocks:
            for name, linear in list(block.named_children()):
                assert isinstance(linear, nn.Linear)
                setattr(block, name, LowRank(linear) if name == "up" else linear.requires_grad_(False))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Swish(torch.autograd.Function):
    """Keeps only its input, and computes the rest again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        sigmoid = torch.sigmoid(x)
        return grads[0] * (sigmoid * (1 + x * (1 - sigmoid)))


class SwishBlock(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(Swish.apply(self.up(x)))


class CustomFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(SwishBlock(), SwishBlock(), SwishBlock())
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


class Hooked(nn.Module):
    """Features are gathered by hooks around a backbone that knows nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(Residual(), Residual(), Residual())
        self.head = nn.Linear(3 * WIDTH, CLASSES)
        features: dict[int, Any] = {}
        self.features = features
        for index, layer in enumerate(self.backbone):
            layer.register_forward_hook(lambda m, i, output, index=index: features.__setitem__(index, output))

    def forward(self, x: Tensor) -> Tensor:
        self.features.clear()
        self.backbone(x)
        return self.head(torch.cat([self.features[index] for index in range(3)], -1))


class Nerf(nn.Module):
    """Colours along rays: an MLP with a shortcut from its input, then a sum by what the points let through."""

    def __init__(self) -> None:
        super().__init__()
        self.pts_linears = nn.ModuleList([nn.Linear(18, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH + 18, WIDTH)])
        self.alpha_linear, self.rgb_linear = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 3)

    def forward(self, points: Tensor) -> Tensor:
        octaves = [fn(points * 2.0**octave) for octave in range(3) for fn in (torch.sin, torch.cos)]
        encoded = h = torch.cat(octaves, -1)
        for index, linear in enumerate(self.pts_linears):
            h = F.softplus(linear(torch.cat([encoded, h], -1) if index == 2 else h))
        alpha = 1 - torch.exp(-F.softplus(self.alpha_linear(h))[..., 0])
        passed = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha[:, :-1]], 1), 1)
        return ((alpha * passed)[..., None] * torch.sigmoid(self.rgb_linear(h))).sum(1)


class Augmented(nn.Module):
    """Mixes in noise by numpy, and leaves out blocks by Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(ScaledByNumpy() for _ in range(3)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if not self.training or random.random() < 0.95:
                x = block(x)
        return self.head(x)


class ScaledByNumpy(Residual):
    def forward(self, x: Tensor) -> Tensor:
        scale = np.random.uniform(0.5, 1.5) if self.training else 1.0
        return x + scale * self.down(F.silu(self.up(x)) * random.gauss(1, 0.1))


class Annealed(nn.Module):
    """The temperature falls with each call, by a number that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return x + torch.tanh(self.layer(x) / 0.9**self.calls)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Annealed() for _ in range(3)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Gated(nn.Module):
    """A scalar gate, and an empty list of extra rows."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.extra = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(0, WIDTH))
        self.inner = Residual()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate.tanh() * self.inner(x) + self.extra.sum()


class OddShapes(nn.Module):
    """Scalar, empty, transposed and unused parameters, some in lists and dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.never = nn.ModuleList(Gated() for _ in range(3)), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.ParameterDict({"out": nn.Parameter(torch.zeros(1, CLASSES))})
        self.maps = nn.ParameterList([nn.Parameter(torch.randn(CLASSES, WIDTH).t() * 0.4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x @ self.maps[0] + self.bias["out"]


class Remembering(nn.Module):
    """A buffer that grows by one row at each call, and one that isn't saved."""

    seen: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(0, WIDTH))
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = torch.cat([self.seen, x.detach().mean(0, keepdim=True)])
            self.scale = self.scale * 0.95
        return x + self.scale * torch.tanh(self.layer(x - self.seen.mean(0)))


class Memory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Remembering() for _ in range(3)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Fusion(nn.Module):
    """Several inputs by name, one encoder for each, of different kinds; returns several outputs by name."""

    def __init__(self) -> None:
        super().__init__()
        image = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, WIDTH))
        table, series = nn.Sequential(nn.Linear(3, WIDTH), nn.Tanh()), nn.GRU(2, WIDTH, batch_first=True)
        self.encoders = nn.ModuleDict({"image": image, "table": table, "series": series})
        self.fuse, self.kind, self.size = Residual(), nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 1)

    def forward(self, image: Tensor, table: Tensor, series: Tensor) -> dict[str, Tensor]:
        last = self.encoders["series"](series)[1][-1]
        x = self.fuse(self.encoders["image"](image) + self.encoders["table"](table) + last)
        return {"kind": self.kind(x), "size": self.size(x)[:, 0]}


def kind_and_size(model: nn.Module, outputs: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
    sizes = (outputs["size"] - targets["size"]).square().sum()
    return sum_of_cross_entropies(model, outputs["kind"], targets["kind"]) + sizes


class Different(nn.Module):
    """A list of blocks of different kinds, called by keyword, some of which change their input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Shifting(), Keyword(), nn.Linear(WIDTH, WIDTH), Keyword(), Shifting()])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        for block in self.blocks:
            x = block(hidden=x, factor=0.5)["hidden"] if isinstance(block, Keyword) else block(x)
        return self.head(x)


class Shifting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift, self.layer = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x += self.shift
        return torch.tanh(self.layer(x))


class Keyword(Residual):
    def forward(self, hidden: Tensor, factor: float = 1.0, mask: Tensor | None = None) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return {"hidden": hidden + factor * self.down(torch.tanh(self.up(hidden))), "mask": mask}


labelled = partial(Foreign, inputs=floats(WIDTH))
# All but ckpt=compiler, which leaves what is changed in place to the compiler.
EAGER_CKPT = "ckpt=every1 ckpt=every2 ckpt=every3 ckpt=every4 ckpt=sqrt ckpt=auto ckpt=selective"
MODELS = {
    "graph": Foreign(make=Graph, inputs=floats(NODES, WIDTH), lacks="MLPS NORMS SEPARATE_SAMPLES"),
    "fourier": Foreign(
        make=Fourier,
        inputs=floats(8),
        targets=floats(8),
        criterion=sum_of_squares,
        lacks="INNER_LINEARS INNER_PRODUCTS MLPS NORMS REAL_WEIGHTS",
        refuses="adapter=lora adapter=qlora compile=torchscript sparsity=two_of_four",
    ),
    "tied_by_memory": labelled(make=TiedByMemory, lacks="MLPS NORMS SEPARATE_MEMORY"),
    "tied_blocks": labelled(make=TiedBlocks, lacks="MLPS NORMS SHARDABLE"),
    "adapted": labelled(make=Adapted, lacks="MLPS NORMS", refuses="sparsity"),
    "custom_function": labelled(make=CustomFunction, lacks="MLPS NORMS"),
    "hooked": labelled(make=Hooked, lacks="MLPS NORMS"),
    "nerf": Foreign(
        make=Nerf,
        inputs=floats(4, 3),
        targets=floats(3),
        criterion=sum_of_squares,
        lacks="BLOCKS BRANCHES MLPS NORMS SEPARATE_SAMPLES SKIPPABLE",
    ),
    "augmented": labelled(make=Augmented, draws=True, lacks="MLPS NORMS NO_RANDOMNESS", refuses="compile=torchscript"),
    "counting": labelled(
        make=Counting, lacks="MLPS NORMS", refuses="tile=blocks compile=torchscript sparsity=two_of_four"
    ),
    "odd_shapes": labelled(make=OddShapes, lacks="MLPS NORMS SHARDABLE"),
    "memory": labelled(
        make=Memory, lacks="MLPS NORMS SEPARATE_SAMPLES", refuses="compile=torchscript sparsity=two_of_four"
    ),
    "fusion": Foreign(
        make=Fusion,
        inputs=named(image=floats(1, 4, 4), table=floats(3), series=floats(3, 2)),
        targets=named(kind=lambda n: torch.randint(CLASSES, (n,)), size=floats()),
        criterion=kind_and_size,
        lacks="BRANCHES MLPS NORMS SKIPPABLE",
    ),
    "different": labelled(
        make=Different, lacks="MLPS NORMS PLAIN_BLOCKS", refuses=f"tile=blocks {EAGER_CKPT} offload=parameters"
    ),
}
