"""A model that holds the card on which it computes: nobody else's may compute there at the same time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from torch import Tensor, nn

CARDS = "CUDA_VISIBLE_DEVICES"
FOLDER = "HELD_CARDS"  # in the environment: where each card has a file


class Holding(nn.Module):
    """Takes ids (n, t), gives logits (n, t, vocab_size). The first forward pass on a card notes it, and takes it for as
    long as its process lives. Raises BlockingIOError if another process has it."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 8)
        self.head = nn.Linear(8, vocab_size)
        self._held: int | None = None

    def forward(self, ids: Tensor) -> Tensor:
        if ids.is_cuda and self._held is None:
            path = Path(os.environ[FOLDER]) / os.environ[CARDS]
            self._held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(self._held, f"{os.getpid()}\n".encode())
        return self.head(self.embed(ids))
