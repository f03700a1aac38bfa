"""Text of any length, read in windows of sequence_length tokens and the token after them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import final

import numpy as np
import torch
from torch import Tensor

from lowvram.data.randomness import Stream, generator
from lowvram.data.source import Data, Samples
from lowvram.data.spec import DataSpec, Modality
from lowvram.data.tokenizer import Tokenizer


@final
class TokenStream:
    """Arrays of tokens, read as one. The arrays may be mapped files: only what is read is copied."""

    def __init__(self, pieces: Sequence[np.ndarray]) -> None:
        self.pieces = pieces  # each (num_tokens,) integers
        self.ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def read(self, start: int, num_tokens: int) -> np.ndarray:
        """A copy of `num_tokens` tokens from `start` on, (num_tokens,) integers."""
        stop = start + num_tokens
        first, last = np.searchsorted(self.ends, [start, stop - 1], side="right")
        touched = zip(self.pieces[first : last + 1], self.ends[first : last + 1].tolist(), strict=True)
        begins = ((piece, end - len(piece)) for piece, end in touched)
        return np.concatenate([piece[max(start - begin, 0) : stop - begin] for piece, begin in begins])


@final
class TrainWindows(Samples):
    """Adjacent windows over the whole text. Each epoch shifts all of them by a random number of tokens."""

    def __init__(self, stream: TokenStream, sequence_length: int, seed: int) -> None:
        self.stream, self.sequence_length, self.seed = stream, sequence_length, seed

    def __len__(self) -> int:
        return (len(self.stream) - 1) // self.sequence_length

    def sample(self, index: int, epoch: int) -> tuple[Tensor, Tensor]:
        num_starts = len(self.stream) - self.sequence_length
        start = (index * self.sequence_length + shift(self.seed, epoch, num_starts)) % num_starts
        return next_token(self.stream, start, self.sequence_length)


@final
class EvalWindows(Samples):
    """At most `limit` windows that do not overlap, spread evenly over the text. The same in every epoch."""

    def __init__(self, stream: TokenStream, sequence_length: int, limit: int) -> None:
        self.stream, self.sequence_length = stream, sequence_length
        self.num_windows = min(limit, (len(stream) - 1) // sequence_length)

    def __len__(self) -> int:
        return self.num_windows

    def sample(self, index: int, epoch: int) -> tuple[Tensor, Tensor]:
        start = index * ((len(self.stream) - 1) // self.num_windows)
        return next_token(self.stream, start, self.sequence_length)


@lru_cache(maxsize=8)
def shift(seed: int, epoch: int, num_starts: int) -> int:
    """By how many tokens the windows of an epoch are shifted."""
    return int(generator(Stream.SHIFT, seed, epoch).integers(num_starts))


def next_token(stream: TokenStream, start: int, sequence_length: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets (sequence_length,) int64: the target of each token is the one after it."""
    tokens = torch.from_numpy(stream.read(start, sequence_length + 1).astype(np.int64))
    return tokens[:-1], tokens[1:]


def windowed(
    train: TokenStream,
    held_out: TokenStream,
    tokenizer: Tokenizer,
    sequence_length: int,
    eval_samples: int,
    seed: int,
    origin: str,
) -> Data:
    """Windows over two texts, each longer than `sequence_length`; `origin` says in the log where they come from."""
    trained_on = TrainWindows(train, sequence_length, seed)
    evaluated = EvalWindows(held_out, sequence_length, eval_samples)
    description = (
        f"{origin}: {len(train) / 1e6:.2f} million {tokenizer.unit} to train on, {len(trained_on)} samples of"
        f" {sequence_length} {tokenizer.unit}, {len(evaluated)} held out"
    )
    return Data(DataSpec(Modality.TOKENS, tokenizer.vocab_size, (sequence_length,)), trained_on, evaluated, description)
