"""A module of your own with every knob, planned for a card, then measured here. Run it: python examples/own_model.py

From the command line the same module trains with
    python train.py model=external model.target=examples.own_model.Speaker model.reads=TOKENS \\
        'model.args={vocab_size: data.vocab_size}'
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import lowvram

KNOBS = ["precision=bf16", "ckpt=every1", "accum=x4", "optimizer=sgd optimizer.lr=0.1"]


class Speaker(nn.Module):
    """A small language model."""

    def __init__(self, vocab_size: int = 256, width: int = 64, depth: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        layers = (nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(depth))
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, time) to logits (batch, time, vocabulary)."""
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def main() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(256, (16, 129))
    batch = lowvram.Part(tokens[:, :-1], tokens[:, 1:])
    for knobs in ([], KNOBS):
        task = lowvram.task(Speaker(), batch.inputs)
        planned = lowvram.plan(task, batch.targets, batch_size=16, knobs=knobs, device="rtx3060")
        rig = lowvram.assemble(task, knobs, device="cpu")
        found = lowvram.measure(rig, [batch] * 5, warmup_steps=1, steps=3)
        sizes = f"{planned['allocated_bytes'] / 2**20:.1f} MiB on an RTX 3060, {found.peak_bytes / 2**20:.1f} MiB here"
        print(
            f"{' '.join(knobs) or 'no knobs'}: {sizes}, {found.step_ms_p50:.0f} ms a step, loss {found.losses[-1]:.2f}"
        )


if __name__ == "__main__":
    main()
