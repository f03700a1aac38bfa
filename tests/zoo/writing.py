"""Models whose forward pass writes into their weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.foreign import CLASSES, VOCABULARY, Foreign, tokens
from tests.zoo.odd import WIDTH, Residual

LACKS = "MLPS NORMS SEPARATE_SAMPLES STEADY_BLOCKS STEADY_WEIGHTS"


class Clamping(nn.Module):
    """A monotone block: weights are kept above zero, as in critics that clip theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.up.weight.data.clamp_(min=0.01)
        return x + self.down(torch.tanh(self.up(x)))


class Decaying(nn.Module):
    """A block whose weight is made smaller each time that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.mul_(0.9)
        return x + self.down(F.silu(self.up(x)))


class Bounded(nn.Module):
    """Embeddings with a largest norm, which torch scales where they are looked up."""

    def __init__(self, block: type[nn.Module] = Residual, max_norm: float | None = 1.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, max_norm=max_norm)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids).mean(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


MODELS = {
    "bounded": Foreign(make=Bounded, inputs=tokens(4), lacks="MLPS NORMS STEADY_WEIGHTS"),
    "clamping": Foreign(make=lambda: Bounded(Clamping, None), inputs=tokens(4), lacks=LACKS),
    "decaying": Foreign(make=lambda: Bounded(Decaying, None), inputs=tokens(4), lacks=LACKS),
}
