"""A knob in a loop of your own: the three lines between the arrows. Run it: python examples/own_loop.py"""

from __future__ import annotations

import torch
from torch import nn

import lowvram

torch.manual_seed(0)
layers = [nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(6)]
model = nn.Sequential(nn.Embedding(256, 64), *layers, nn.Linear(64, 256))
tokens = torch.randint(256, (8, 129))
inputs, targets = tokens[:, :-1], tokens[:, 1:]

# -->
task = lowvram.task(model, inputs)
lowvram.assemble(task, ["ckpt=every1"])  # changes the model in place: every block is computed again when it is needed
# <--

optimizer = torch.optim.AdamW(model.parameters())
for number in range(3):
    with lowvram.ledger(model, optimizer, inputs) as peak:
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"step {number}: loss {loss.item():.3f}, peak {peak.peak_bytes / 2**20:.1f} MiB")
