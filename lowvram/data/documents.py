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
    """What a sample of text is. Users type the names."""

    windows = "a fixed number of tokens from all texts joined into one"
    documents = "one text; a longer text continues in the next sample"


Pieces = Callable[[int], list[np.ndarray]]  # index of a text -> its tokens, in arrays to be joined


@final
class Documents(Texts):
    """Each token of a text, its end included, is predicted from those before it. A text of more than `padded_length`
    tokens is split over several samples; a text of fewer than 2 tokens is left out."""

    def __init__(
        self, pieces: Pieces, lengths: np.ndarray, padded_length: int, pad_id: int, limit: int | None = None
    ) -> None:
        """Args:
        pieces: the tokens of each text, with its beginning and end marks.
        lengths: number of these tokens, (num_texts,) integers.
        limit: the most samples, evenly spread over all; None: all of them.
        """
        self.pieces, self.lengths, self.padded_length, self.pad_id = pieces, lengths, padded_length, pad_id
        num_samples_of = -(-np.maximum(lengths - 1, 0) // padded_length)
        self.ends = np.cumsum(num_samples_of, dtype=np.int64)  # the number of samples of each text and those before it
        num_samples = int(self.ends[-1]) if len(self.ends) else 0
        num_kept = min(num_samples, limit or num_samples)
        self.kept = np.arange(num_kept, dtype=np.int64) * num_samples // max(num_kept, 1)

    def __len__(self) -> int:
        return len(self.kept)

    def place(self, index: int | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The text of a sample, and where in it the sample starts."""
        piece = self.kept[index]
        text = np.searchsorted(self.ends, piece, side="right")
        first = np.where(text > 0, self.ends[text - 1], 0)
        return text, (piece - first) * self.padded_length

    def length(self, index: int, epoch: int) -> int:
        text, start = self.place(index)
        return int(min(self.lengths[text] - 1 - start, self.padded_length))

    def longest(self, num_samples: int) -> int:
        texts, starts = self.place(np.arange(len(self)))
        lengths = np.sort(np.minimum(self.lengths[texts] - 1 - starts, self.padded_length))[::-1]
        again, left = divmod(num_samples, len(self))
        return int(again * lengths.sum() + lengths[:left].sum())

    def sample(self, index: int, epoch: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets (padded_length,) int64."""
        text, start = self.place(index)
        length = self.length(index, epoch)
        real_tokens = next_token(TokenStream(self.pieces(int(text))), int(start), length)
        inputs, targets = torch.full((self.padded_length,), self.pad_id), torch.full((self.padded_length,), IGNORE)
        inputs[:length], targets[:length] = real_tokens
        return inputs, targets


def as_documents(train: Documents, held_out: Documents, tokenizer: Tokenizer, origin: str) -> Data:
    """`origin` says in the log where the texts come from."""
    description = (
        f"{origin}: {len(train)} samples of up to {train.padded_length} {tokenizer.unit}, each of one text;"
        f" {len(held_out)} held out"
    )
    return Data(DataSpec(Modality.TOKENS, tokenizer.vocab_size, (train.padded_length,)), train, held_out, description)
