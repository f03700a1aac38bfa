"""Modules as other people write them, without a thought of lowvram: what plans of strangers are held against."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Encoder(nn.Module):
    """torch's own encoder layers, post-norm, with a causal mask.

    Tokens (batch, time) to logits (batch, time, vocabulary).
    """

    def __init__(self, vocab_size: int, width: int = 512, depth: int = 6, heads: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.head(self.encoder(self.embedding(tokens), mask=mask))


class Recurrent(nn.Module):
    """A gated recurrence written out step by step. Tokens (batch, time) to logits (batch, time, vocabulary)."""

    def __init__(self, vocab_size: int, width: int = 512, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.cells = nn.ModuleList(nn.GRUCell(width, width) for _ in range(depth))
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        inputs = self.embedding(tokens).unbind(1)
        for cell in self.cells:
            state, outputs = torch.zeros_like(inputs[0]), []
            for each in inputs:
                state = cell(each, state)
                outputs.append(state)
            inputs = tuple(outputs)
        return self.head(torch.stack(inputs, 1))


class Mixer(nn.Module):
    """An MLP-Mixer (Tolstikhin et al., 2021). Images (batch, 3, size, size) to logits (batch, classes)."""

    def __init__(self, classes: int, size: int = 128, patch: int = 8, width: int = 384, depth: int = 8) -> None:
        super().__init__()
        places = (size // patch) ** 2
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.layers = nn.ModuleList(MixerLayer(places, width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.patches(images).flatten(2).transpose(1, 2)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden).mean(1))


class MixerLayer(nn.Module):
    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Sequential(nn.Linear(places, 2 * places), nn.GELU(), nn.Linear(2 * places, places))
        self.within = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.across(self.first(hidden).transpose(1, 2)).transpose(1, 2)
        return hidden + self.within(self.second(hidden))


class Unet(nn.Module):
    """Down, up, and across, with a class of the whole at the end. Images (batch, 3, size, size) to logits (batch,
    classes)."""

    def __init__(self, classes: int, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth)]
        self.first = convolved(3, width)
        self.down = nn.ModuleList(convolved(low, high) for low, high in pairwise(widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * low, low, 2, 2) for low in reversed(widths[:-1]))
        self.across = nn.ModuleList(convolved(2 * low, low) for low in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first(images)
        skipped = []
        for layer in self.down:
            skipped.append(hidden)
            hidden = layer(F.max_pool2d(hidden, 2))
        for up, across in zip(self.up, self.across, strict=True):
            hidden = across(torch.cat([up(hidden), skipped.pop()], 1))
        return self.head(F.adaptive_avg_pool2d(hidden, 4)).mean((2, 3))


def convolved(low: int, high: int) -> nn.Sequential:
    both = [(low, high), (high, high)]
    return nn.Sequential(
        *(nn.Sequential(nn.Conv2d(*each, 3, padding=1), nn.GroupNorm(8, high), nn.SiLU()) for each in both)
    )


class Waves(nn.Module):
    """Dilated, gated convolutions over time (van den Oord et al., "WaveNet", 2016). Tokens (batch, time) to logits
    (batch, time, vocabulary)."""

    def __init__(self, vocab_size: int, width: int = 128, depth: int = 10) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.dilations = [2 ** (layer % 8) for layer in range(depth)]
        self.filters = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=each) for each in self.dilations)
        self.mixes = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in self.dilations)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, total = self.embedding(tokens).transpose(1, 2), None
        for dilation, filter_, mix in zip(self.dilations, self.filters, self.mixes, strict=True):
            value, gate = filter_(F.pad(hidden, (dilation, 0))).chunk(2, 1)
            part = mix(value.tanh() * gate.sigmoid())
            hidden, total = hidden + part, part if total is None else total + part
        return self.head(F.relu(total).transpose(1, 2))  # pyright: ignore[reportArgumentType]


class Gated(nn.Module):
    """A decoder with torch's own RMS norms and gated MLPs. Tokens (batch, time) to logits (batch, time, vocabulary)."""

    def __init__(self, vocab_size: int, width: int = 512, depth: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(GatedLayer(width) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


class GatedLayer(nn.Module):
    def __init__(self, width: int, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.queries, self.keys = nn.RMSNorm(width // heads), nn.RMSNorm(width // heads)
        self.attention, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = self.attention(self.first(hidden)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(self.queries(q), self.keys(k), v, is_causal=True)
        hidden = hidden + self.out(seen.transpose(1, 2).flatten(2))
        normed = self.second(hidden)
        return hidden + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Pixels(nn.Module):
    """Convolutions, and attention between the pixels of what they make, channels before pixels as they lie. Images
    (batch, 3, size, size) to logits (batch, classes)."""

    def __init__(self, classes: int, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.smaller = convolved(3, width), nn.Conv2d(width, width, 4, 4)
        self.attention, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)
        self.second, self.head = convolved(width, width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.smaller(self.first(images))
        q, k, v = self.attention(hidden).flatten(2).unflatten(1, (3, self.heads, -1)).transpose(-1, -2).unbind(1)
        seen = F.scaled_dot_product_attention(q, k, v).transpose(-1, -2).reshape(hidden.shape)
        return self.head(self.second(hidden + self.out(seen)).mean((2, 3)))
