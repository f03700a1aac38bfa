"""What a model has to know of its data before it is built."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor


class Modality(Enum):
    """What a sample is."""

    TOKENS = "tokens"  # each the target of those before it
    LABELLED_TOKENS = "labelled tokens"  # filled up to one length; each sample has a class
    IMAGES = "images"  # each has a class


@dataclass(frozen=True)
class DataSpec:
    """The shape of one sample's inputs, and how many classes its targets have.

    modality     TOKENS                        LABELLED_TOKENS      IMAGES
    num_classes  size of the vocabulary        classes              classes
    shape        (sequence_length,)            (sequence_length,)   (channels, height, width)
    vocab_size   None: that are the classes    tokens there are     None
    """

    modality: Modality
    num_classes: int
    shape: tuple[int, ...]
    vocab_size: int | None = None

    @property
    def num_tokens(self) -> int:
        """Size of the vocabulary, where there is one."""
        return self.num_classes if self.vocab_size is None else self.vocab_size

    def example(self, num_samples: int) -> tuple[Any, Tensor]:
        """Inputs and targets like those of so many samples, all zero (a mask: all one)."""
        shape = (num_samples, *self.shape)
        label = torch.zeros(num_samples, dtype=torch.long)
        if self.modality is Modality.IMAGES:
            return torch.zeros(shape), label
        tokens = torch.zeros(shape, dtype=torch.long)
        if self.modality is Modality.TOKENS:
            return tokens, torch.zeros_like(tokens)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, label
