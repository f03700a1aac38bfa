"""Texts of any length, each by itself: no sample holds tokens of two."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import final

import numpy as np
import torch
from torch import Tensor

from lowvram.core.rig import IGNORE
from lowvram.data.source import Data, Texts
from lowvram.data.spec import DataSpec, Modality
from lowvram.data.tokenizer import Tokenizer
from lowvram.data.windows import TokenStream, next_token


class Unit(Enum):
    """What a sample of text is. The names are what a user types."""

    windows = "tokens side by side in one long text, always as many"
    documents = "a text by itself; a longer one goes on in the next sample"


Pieces = Callable[[int], list[np.ndarray]]  # the tokens of a text by its number, one after another


@final
class Documents(Texts):
    """Each token of a text is predicted from those before it, and its end too. A text of more than `room` tokens is
    several samples; one without two tokens is none."""

    def __init__(self, pieces: Pieces, lengths: np.ndarray, room: int, pad_id: int, limit: int | None = None) -> None:
        """Args:
        pieces: of each text, with its marks.
        lengths: how many tokens that are, (num_texts,) integers.
        limit: the most samples, evenly spread over all; None: all of them.
        """
        self.pieces, self.lengths, self._room, self.pad_id = pieces, lengths, room, pad_id
        self.ends = np.cumsum(-(-np.maximum(lengths - 1, 0) // room), dtype=np.int64)  # samples up to each text
        num_samples = int(self.ends[-1]) if len(self.ends) else 0
        num_kept = min(num_samples, limit or num_samples)
        self.kept = np.arange(num_kept, dtype=np.int64) * num_samples // max(num_kept, 1)

    @property
    def room(self) -> int:
        return self._room

    def __len__(self) -> int:
        return len(self.kept)

    def place(self, index: int | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The text of a sample, and where in it the sample starts."""
        piece = self.kept[index]
        text = np.searchsorted(self.ends, piece, side="right")
        first = np.where(text > 0, self.ends[text - 1], 0)
        return text, (piece - first) * self.room

    def length(self, index: int, epoch: int) -> int:
        text, start = self.place(index)
        return int(min(self.lengths[text] - 1 - start, self.room))

    def longest(self, num_samples: int) -> int:
        texts, starts = self.place(np.arange(len(self)))
        lengths = np.sort(np.minimum(self.lengths[texts] - 1 - starts, self.room))[::-1]
        again, left = divmod(num_samples, len(self))
        return int(again * lengths.sum() + lengths[:left].sum())

    def sample(self, index: int, epoch: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets (room,) int64."""
        text, start = self.place(index)
        length = self.length(index, epoch)
        found = next_token(TokenStream(self.pieces(int(text))), int(start), length)
        inputs, targets = torch.full((self.room,), self.pad_id), torch.full((self.room,), IGNORE)
        inputs[:length], targets[:length] = found
        return inputs, targets


def as_documents(train: Documents, held_out: Documents, tokenizer: Tokenizer, origin: str) -> Data:
    """`origin` says what they are."""
    description = (
        f"{origin}: {len(train)} samples of up to {train.room} {tokenizer.unit}, each of one text;"
        f" {len(held_out)} held out"
    )
    return Data(DataSpec(Modality.TOKENS, tokenizer.vocab_size, (train.room,)), train, held_out, description)
