"""Which modules compute a row alone as among others: what NaN doesn't show, and no false alarms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowvram.core.probes.separate_samples import SeparateBlocks
from lowvram.knobs.tile.mlps import Mlps
from tests.core.probes.structures import structure_of
from tests.restless import BLOCKS, WIDTH, Mlp, Net


class TopKOfBatch(Mlp):
    """Keeps the largest numbers of all samples together, as BatchTopK autoencoders do."""

    def between(self, x: Tensor) -> Tensor:
        values = x.flatten()
        places = values.topk(2 * len(x)).indices
        return torch.zeros_like(values).scatter(0, places, values[places]).view_as(x)


class MedianGate(Mlp):
    def between(self, x: Tensor) -> Tensor:
        return x * (x > x.median()).to(x)


class GateInTraining(Mlp):
    """The same in training alone, where it drops numbers, too."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def between(self, x: Tensor) -> Tensor:
        return self.dropout(x) * (x > x.median()).to(x) if self.training else x


class GateAndNoise(Mlp):
    """The same with noise that is never off."""

    def between(self, x: Tensor) -> Tensor:
        return (x + torch.randn_like(x)) * (x > x.median()).to(x)


class ByCount(Mlp):
    def between(self, x: Tensor) -> Tensor:
        return x / len(x)


class ByCountInTraining(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.drop_rate = 0.3

    def between(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.drop_rate) / x.shape[0] if self.training else x


class Capacity(nn.Module):
    """An expert that takes half of the tokens of all samples."""

    def __init__(self, share: float = 0.5) -> None:
        super().__init__()
        self.router, self.expert, self.share = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH), share

    def forward(self, x: Tensor) -> Tensor:
        gate = self.router(x)[:, 0]
        taken = gate.argsort(descending=True)[: max(1, int(len(x) * self.share))]
        output = torch.zeros_like(x)
        output[taken] = self.expert(x[taken]) * gate[taken].sigmoid()[:, None]
        return x + output


class Experts(nn.Module):
    """Each of four experts takes as many samples as come on average, and a quarter more, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.router(x).softmax(-1).max(-1)
        order = F.one_hot(chosen, 4).cumsum(0).gather(1, chosen[:, None])[:, 0]
        gates = gates * (order <= -(-5 * len(x) // 16))
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        return x + gates[:, None] * outputs[torch.arange(len(x)), chosen]


class Winner(Mlp):
    """Only the sample with the largest sum goes through."""

    def between(self, x: Tensor) -> Tensor:
        return x * F.one_hot(x.sum(1).argmax(), len(x))[:, None]


class NormalisedGradient(Mlp):
    def between(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient / gradient.norm())
        return x


class NormalisedInside(Mlp):
    """The same by a hook of a module in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.a.register_full_backward_hook(lambda _, inputs, __: (inputs[0] / inputs[0].norm(),))


class FollowsGradients(Mlp):
    level: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.ones(()))

    def between(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(self.follow)
        return x * self.level.clone()

    def follow(self, gradient: Tensor) -> None:
        self.level.mul_(0.9).add_(gradient.norm())


class MeanOfGradients(torch.autograd.Function):
    """Takes the mean over samples where a sum is right."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).mean(0)


class OwnGradient(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def between(self, x: Tensor) -> Tensor:
        return MeanOfGradients.apply(x, self.scale)  # pyright: ignore[reportReturnType]


MIXING = [
    *(TopKOfBatch, MedianGate, GateInTraining, GateAndNoise, ByCount, ByCountInTraining, Capacity, Experts, Winner),
    *(NormalisedGradient, NormalisedInside, FollowsGradients, OwnGradient),
    *(lambda share=share: Capacity(share) for share in (0.3, 0.75)),
]


class OwnExperts(Experts):
    """Without a limit."""

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.router(x).topk(2, -1)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        picked = outputs.gather(1, chosen[..., None].expand(-1, -1, WIDTH))
        return x + (gates.softmax(-1)[..., None] * picked).sum(1)


class InFp32(Mlp):
    """As the norms of transformers compute."""

    def between(self, x: Tensor) -> Tensor:
        exact = x.float()
        return (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-6)).to(x)


class InBf16(Mlp):
    def between(self, x: Tensor) -> Tensor:
        return (x.bfloat16() @ self.b.weight.bfloat16()).to(x)


class Rounded(Mlp):
    """Quantised activations, with straight-through gradients."""

    def between(self, x: Tensor) -> Tensor:
        return x + ((x * 127).round() / 127 - x).detach()


class MedianOfSample(Mlp):
    def between(self, x: Tensor) -> Tensor:
        return x * (x > x.median(-1, keepdim=True).values).to(x)


class HalvedGradient(Mlp):
    def between(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.5)
        return x


class Reentrant(Mlp):
    def forward(self, x: Tensor) -> Any:
        return x + checkpoint(super().forward, x, use_reentrant=True)  # pyright: ignore[reportOperatorIssue]


class NormAndAttention(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.GroupNorm(2, WIDTH), nn.Dropout(0.5, inplace=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True)

    def between(self, x: Tensor) -> Tensor:
        tokens = self.drop(self.norm(x))[:, None]
        return self.attention(tokens, tokens, tokens, need_weights=False)[0][:, 0]


APART = [OwnExperts, InFp32, InBf16, Rounded, MedianOfSample, HalvedGradient, Reentrant, NormAndAttention]


def is_found(block: Callable[[], nn.Module], dtype: torch.dtype, device: str) -> bool:
    model = Net(block, 1).to(device, dtype)
    before = {name: values.clone() for name, values in model.state_dict().items()}
    inputs_of = lambda num: torch.randn(num, WIDTH, dtype=dtype)  # noqa: E731
    blocks = [model.get_submodule("blocks.0")]
    found = SeparateBlocks().find(structure_of(model, inputs_of, blocks))
    if device == "cpu":
        assert all(torch.equal(values, before[name]) for name, values in model.state_dict().items())
        assert all(each.grad is None for each in model.parameters())
    return bool(found)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_what_mixes_samples_without_nan_noticing() -> None:
    for dtype, device in ((torch.float32, "cpu"), (torch.float64, "meta")):
        assert not [block for block in MIXING if is_found(block, dtype, device)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_no_false_alarms() -> None:
    blocks = dict(BLOCKS)
    for block in APART:
        assert is_found(block, torch.float32, "cpu"), block
        assert is_found(block, torch.float32, "meta"), block
    del blocks["Sharing"]  # needs the block before it
    missing = {name for name, block in blocks.items() if not is_found(block, torch.float32, "cpu")}
    assert missing == {  # mix samples, or with weights of zero nobody sees what they do
        *("InstanceNorm", "CumulativeNorm", "RecurrentNorm", "OwnNorm", "Ema", "LargeEma", "WrittenThroughData"),
        *("Spectral", "OldSpectral", "PlainTensor"),
    }


class MixesTokens(nn.Module):
    """What it does to a token depends on the others, which NaN doesn't show."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.change = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), change

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.change(torch.tanh(self.up(x))))


class Around(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


def test_mlps_that_mix_tokens() -> None:
    changes: dict[Callable[[Tensor], Tensor], bool] = {
        lambda x: x: True,
        lambda x: x * (x > x.mean(-1, keepdim=True)): True,
        lambda x: x * (x > x.median()): False,
        lambda x: x / x.shape[1]: False,
        lambda x: x * (x.sum(-1, keepdim=True).argsort(1) < 2): False,
    }
    for change, is_apart in changes.items():
        block = Around(MixesTokens(change))
        found = Mlps(("mlp",)).find(structure_of(nn.Sequential(block), torch.randn(2, 6, WIDTH), [block]))
        assert bool(found) == is_apart
