"""Models as people write them who have never seen lowvram, for benches: nothing here was made to be planned well."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PatchTransformer(nn.Module):
    """A vision Transformer: a convolution cuts the image into patches."""

    def __init__(self, num_classes: int, size: int = 64, patch: int = 16, width: int = 256, depth: int = 6) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, patch, patch)
        self.places = nn.Parameter(torch.zeros(1, (size // patch) ** 2, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.cut(images).flatten(2).transpose(1, 2) + self.places
        return self.head(self.layers(patches).mean(1))


class Hourglass(nn.Module):
    """Convolutions down and up again, with skips, as in a U-Net; classifies by the mean of what comes out."""

    def __init__(self, num_classes: int, width: int = 24) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(two_convolutions(of, to) for of, to in zip([3, *widths], widths, strict=False))
        self.middle = two_convolutions(widths[-1], widths[-1])
        self.up = nn.ModuleList(two_convolutions(2 * each, max(width, each // 2)) for each in reversed(widths))
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        state, skips = images, []
        for block in self.down:
            state = block(state)
            skips.append(state)
            state = nn.functional.max_pool2d(state, 2)
        state = self.middle(state)
        for block, skip in zip(self.up, reversed(skips), strict=True):
            state = block(torch.cat([nn.functional.interpolate(state, scale_factor=2.0), skip], 1))
        return self.head(state.mean((2, 3)))


def two_convolutions(of: int, to: int) -> nn.Sequential:
    convolutions = [nn.Conv2d(of, to, 3, padding=1), nn.GroupNorm(4, to), nn.ReLU(), nn.Conv2d(to, to, 3, padding=1)]
    return nn.Sequential(*convolutions, nn.ReLU())


class Mixer(nn.Module):
    """An MLP-Mixer over patches that `unfold` cuts."""

    def __init__(self, num_classes: int, size: int = 64, patch: int = 8, width: int = 256, depth: int = 6) -> None:
        super().__init__()
        self.patch, places = patch, (size // patch) ** 2
        self.embed = nn.Linear(3 * patch * patch, width)
        self.over_places = nn.ModuleList(perceptron(places, 2 * places) for _ in range(depth))
        self.over_features = nn.ModuleList(perceptron(width, 4 * width) for _ in range(depth))
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        state = self.embed(nn.functional.unfold(images, self.patch, stride=self.patch).transpose(1, 2))
        for over_places, over_features in zip(self.over_places, self.over_features, strict=True):
            state = state + over_places(state.transpose(1, 2)).transpose(1, 2)
            state = state + over_features(state)
        return self.head(state.mean(1))


def perceptron(width: int, inner: int) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))


class Recurrent(nn.Module):
    """A language model of LSTMs."""

    def __init__(self, vocab_size: int, width: int = 384, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.layers = nn.LSTM(width, width, depth, batch_first=True)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens))[0])
