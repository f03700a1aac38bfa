"""Tokens of texts with a class, padded to one length."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lowvram.data.spec import IDS, MASK, TextRules


def padded(tokens: np.ndarray, length: int, rules: TextRules) -> dict[str, Tensor]:
    """The inputs made of a text of (num_tokens,) integers: cut to `length`, ended and padded as the model asks."""
    ids = np.full(length, rules.pad_id, np.int64)
    kept = ended(tokens[:length], length, rules.end_id)
    ids[: len(kept)] = kept
    return {IDS: torch.from_numpy(ids), MASK: (torch.arange(length) < len(kept)).long()}


def ended(tokens: np.ndarray, length: int, end_id: int | None) -> np.ndarray:
    """The tokens with `end_id` as the last, at most `length` in all; unchanged if `end_id` is None."""
    if end_id is None or (len(tokens) and tokens[-1] == end_id):
        return tokens
    return np.append(tokens[: length - 1].astype(np.int64), end_id)
