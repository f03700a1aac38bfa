"""Models of images as their authors wrote them."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.foreign import CLASSES, Foreign, floats, sum_of_cross_entropies

WIDTH, SIZE = 8, 8


class DropPath(nn.Module):
    """Leaves out a branch for some of the samples."""

    def __init__(self, drop_prob: float = 0.0) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep_prob = 1 - self.drop_prob
        random_tensor = torch.bernoulli(x.new_full((x.shape[0],) + (1,) * (x.ndim - 1), keep_prob))
        return x * random_tensor.div_(keep_prob)


class LayerScale(nn.Module):
    def __init__(self, init: float = 0.5) -> None:
        super().__init__()
        self.gamma = nn.Parameter(init * torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class VitBlock(nn.Module):
    def __init__(self, drop_path: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6), nn.LayerNorm(WIDTH, eps=1e-6)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.ls1, self.ls2 = LayerScale(), LayerScale()
        self.drop_path1 = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()
        self.drop_path2 = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()

    def attn(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, 2, c // 2).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class Vit(nn.Module):
    """A class token, learnt positions, and branches that are left out the more often the deeper they are."""

    def __init__(self, drop_path_rate: float = 0.5, depth: int = 3) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, 5, WIDTH) * 0.02)
        rates = [rate.item() for rate in torch.linspace(0, drop_path_rate, depth, device="cpu")]
        self.blocks = nn.Sequential(*(VitBlock(rate) for rate in rates))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class ConvNextBlock(nn.Module):
    """Depthwise, then layers over channels that come last."""

    def __init__(self) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.pwconv1, self.act, self.pwconv2 = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        self.gamma = nn.Parameter(0.5 * torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        x = self.gamma * self.pwconv2(self.act(self.pwconv1(x)))
        return shortcut + x.permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 2, 2)
        self.stages = nn.Sequential(ConvNextBlock(), ConvNextBlock(), ConvNextBlock())
        self.norm, self.head = nn.GroupNorm(1, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.stages(self.stem(x))).mean([-2, -1]))


class BasicBlock(nn.Module):
    def __init__(self, inplanes: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False), nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False), nn.BatchNorm2d(planes)
        self.downsample = None
        if stride != 1 or inplanes != planes:
            self.downsample = nn.Sequential(nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(4, 4, 1), BasicBlock(4, 4, 1))
        self.layer2 = nn.Sequential(BasicBlock(4, 8, 2), BasicBlock(8, 8, 1))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(self.layer2(self.layer1(x))), 1))


def conv_bn(inp: int, oup: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inp, oup, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(oup), nn.ReLU6(inplace=True))


class InvertedResidual(nn.Module):
    def __init__(self, inp: int, oup: int, stride: int) -> None:
        super().__init__()
        self.use_res_connect = stride == 1 and inp == oup
        wide = 2 * inp
        project = [nn.Conv2d(wide, oup, 1, bias=False), nn.BatchNorm2d(oup)]
        self.conv = nn.Sequential(conv_bn(inp, wide, 1), conv_bn(wide, wide, 3, stride, groups=wide), *project)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.use_res_connect else self.conv(x)


class MobileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shapes = [(4, 4, 1), (4, 8, 2), (8, 8, 1)]
        self.features = nn.Sequential(conv_bn(3, 4, 3, 2), *(InvertedResidual(*each) for each in shapes))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean([2, 3]))


class DenseLayer(nn.Module):
    """Is handed a list of everything that came before."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(channels), nn.Conv2d(channels, growth, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        return self.conv(F.relu(self.norm(torch.cat(features, 1))))


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, 2, 1)
        self.layers = nn.ModuleList(DenseLayer(4 + 4 * i, 4) for i in range(3))
        self.classifier = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(features))
        return self.classifier(torch.cat(features, 1).mean([2, 3]))


class InceptionOutputs(NamedTuple):
    logits: Tensor
    aux_logits: Tensor | None


class Mixed(nn.Module):
    """Branches side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.three = nn.Conv2d(WIDTH, 4, 1), nn.Conv2d(WIDTH, 2, 3, padding=1)
        self.pooled = nn.Conv2d(WIDTH, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.pooled(F.avg_pool2d(x, 3, 1, 1))
        return F.elu(torch.cat([self.one(x), self.three(x), pooled], 1))


class Inception(nn.Module):
    """While it trains a second classifier looks at its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, 2, 1)
        self.mixed_a, self.mixed_b = Mixed(), Mixed()
        self.aux, self.fc = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> InceptionOutputs:
        x = self.mixed_a(self.stem(x))
        aux = self.aux(x.mean([2, 3])) if self.training else None
        return InceptionOutputs(self.fc(self.mixed_b(x).mean([2, 3])), aux)


def with_auxiliary(model: nn.Module, outputs: InceptionOutputs, targets: Tensor) -> Tensor:
    loss = sum_of_cross_entropies(model, outputs.logits, targets)
    return (
        loss if outputs.aux_logits is None else loss + 0.4 * sum_of_cross_entropies(model, outputs.aux_logits, targets)
    )


class StyleResidual(nn.Module):
    """Instance norm that keeps statistics, and an activation in place after it."""

    def __init__(self) -> None:
        super().__init__()
        self.pad, self.conv1, self.conv2 = nn.ReflectionPad2d(1), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)
        self.in1 = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        self.in2 = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.in2(self.conv2(self.pad(F.elu(self.in1(self.conv1(self.pad(x))), inplace=True))))


class StyleNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 4, 3, 2, 1)
        self.res = nn.Sequential(StyleResidual(), StyleResidual(), StyleResidual())
        self.up = nn.Sequential(nn.Upsample(scale_factor=2, mode="nearest"), nn.Conv2d(4, 3, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(self.res(self.down(x))))


def perceptual(model: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
    """Differences of images, and of the products of their channels."""
    del model
    grams = [torch.einsum("bchw,bdhw->bcd", each, each) / SIZE**2 for each in (outputs, targets)]
    return (outputs - targets).square().sum() + (grams[0] - grams[1]).square().sum()


class TNet(nn.Module):
    """A map of coordinates that is made from all points."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.out = nn.Conv1d(3, WIDTH, 1), nn.Linear(WIDTH, 9)

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.gelu(self.lift(x)).max(dim=2)[0]
        return self.out(pooled).view(-1, 3, 3) + torch.eye(3, dtype=x.dtype, device=x.device)


class PointNet(nn.Module):
    """Clouds of points, in any order; the features' map should be orthogonal, which the loss asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.tnet = TNet()
        self.convs = nn.ModuleList(
            nn.Sequential(nn.Conv1d(3 if i == 0 else WIDTH, WIDTH, 1), nn.BatchNorm1d(WIDTH), nn.GELU())
            for i in range(3)
        )
        self.fc = nn.Linear(WIDTH, CLASSES)

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        transform = self.tnet(points)
        x = torch.bmm(transform, points)
        for conv in self.convs:
            x = conv(x)
        return self.fc(torch.max(x, 2)[0]), transform


def with_orthogonality(model: nn.Module, outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    logits, transform = outputs
    off = torch.bmm(transform, transform.transpose(1, 2)) - torch.eye(3, dtype=transform.dtype)
    return sum_of_cross_entropies(model, logits, targets) + 0.01 * off.square().sum()


images = partial(Foreign, inputs=floats(3, SIZE, SIZE))
MODELS = {
    "vit": images(make=Vit, draws=True, lacks="NO_RANDOMNESS"),
    "convnext": images(make=ConvNext, lacks="MLPS"),
    "resnet": images(make=ResNet, lacks="INNER_LINEARS MLPS NORMS SEPARATE_SAMPLES"),
    "mobilenet": images(make=MobileNet, draws=True, lacks="BRANCHES INNER_LINEARS MLPS NORMS NO_RANDOMNESS SKIPPABLE"),
    "densenet": images(make=DenseNet, lacks="INNER_LINEARS MLPS NORMS PLAIN_BLOCKS SEPARATE_SAMPLES"),
    "inception": images(make=Inception, criterion=with_auxiliary, lacks="INNER_LINEARS MLPS NORMS"),
    "style": images(
        make=StyleNet, targets=floats(3, SIZE, SIZE), criterion=perceptual, lacks="INNER_LINEARS MLPS NORMS SKIPPABLE"
    ),
    "pointnet": Foreign(
        make=PointNet,
        inputs=floats(3, 7),
        criterion=with_orthogonality,
        lacks="INNER_LINEARS INNER_PRODUCTS MLPS NORMS SEPARATE_SAMPLES",
        refuses="adapter=lora adapter=qlora",
    ),
}
