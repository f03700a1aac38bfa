"""Masked language modelling: some tokens of a text are hidden, and predicted from the others.

Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding" (2018). The rule is
that of transformers' DataCollatorForLanguageModeling, whose generator goes on from batch to batch; here what is hidden
is a function of seed, epoch and index, so that resuming is exact, and bytes can be masked, too.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol, final

import numpy as np
import torch
from torch import Tensor

from lowvram.config.errors import BadInput, require
from lowvram.core.rig import IGNORE
from lowvram.data.documents import Unit
from lowvram.data.padding import tokenizer_and_rules
from lowvram.data.randomness import Stream, generator
from lowvram.data.source import Data, FollowedModel, ResolvedSource, Samples, Texts, resolved_size
from lowvram.data.spec import DataSpec, Modality, TextRules
from lowvram.data.tokenizer import Tokenizer

MASKED_SHARE = 0.15  # of the tokens is predicted, by default
HIDDEN_SHARE, REPLACED_SHARE = 0.8, 0.1  # of these become the mask, or a random token; the others stay as they are


class TokenSource(Protocol):
    """The settings of texts whose tokens can be masked: a dataclass."""

    @property
    def samples(self) -> Unit: ...

    @property
    def tokenizer(self) -> str: ...

    @property
    def sequence_length(self) -> int | None: ...

    @property
    def masked_share(self) -> float: ...

    def tokens(self, tokenizer: Tokenizer, rules: TextRules, seed: int) -> Data:
        """The texts as samples of tokens, each of which is predicted from those before it."""
        ...


@final
@dataclass(frozen=True)
class MaskedSource(ResolvedSource):
    """A source of texts for a masked language model."""

    source: TokenSource
    rules: TextRules

    def open(self, seed: int) -> Data:
        """Samples of sequence_length tokens, which begin and end with the tokenizer's marks, such as [CLS] and [SEP].

        Raises:
            BadInput: the tokenizer has no token for what is hidden, or a sample has no room for its marks.
        """
        tokenizer, rules = tokenizer_and_rules(self.source.tokenizer, self.rules)
        if tokenizer.mask_id is None:
            allowed = "one with a mask token, which takes the place of hidden tokens, or bytes"
            raise BadInput("data.tokenizer", self.source.tokenizer, allowed)
        length = resolved_size("data.sequence_length", self.source.sequence_length)
        num_marks = sum(map(len, tokenizer.marks))
        allowed = f"more than {num_marks}, the tokenizer's marks around each sample"
        require(length > num_marks, "data.sequence_length", length, allowed)
        bare: Any = replace(self.source, sequence_length=length - num_marks)  # pyright: ignore[reportArgumentType]
        data = bare.tokens(without_marks(tokenizer, self.source.samples), rules, seed)
        masking = Masking(tokenizer.mask_id, tokenizer.special_ids, tokenizer.vocab_size, self.source.masked_share)
        train, held_out = (
            as_masked(samples, Masker(masking, tokenizer.marks, length, rules.padding, stream, drawn_from))
            for samples, stream, drawn_from in ((data.train, Stream.MASK, seed), (data.eval, Stream.EVAL_MASK, 0))
        )
        is_padded = isinstance(train, Texts)
        spec = DataSpec(Modality.MASKED_TOKENS, tokenizer.vocab_size, (length,), is_padded=is_padded)
        return Data(
            spec, train, held_out, f"{data.description}; {self.source.masked_share:.0%} of the tokens predicted"
        )


def without_marks(tokenizer: Tokenizer, unit: Unit) -> Tokenizer:
    """The tokenizer, with other tokens at the ends of texts: of texts that are joined the mark that it puts after a
    text; of others one more token, which is no input, as the last token of a text never is."""
    bare = copy(tokenizer)
    bare.opening = np.zeros(0, np.int32)
    bare.separator = np.zeros(1, np.int32) if unit is Unit.documents else tokenizer.marks[1]
    bare.key = f"{unit.name} without marks {tokenizer.key}"
    return bare


@final
@dataclass(frozen=True)
class Masking:
    """Which tokens are hidden, and how.

    mask_id      takes the place of hidden tokens
    special_ids  of tokens that are never hidden
    vocab_size   random tokens are below it
    share        of the other tokens that is predicted; at least one is
    """

    mask_id: int
    special_ids: tuple[int, ...]
    vocab_size: int
    share: float

    def __call__(self, tokens: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of (num_tokens,) integers; targets that aren't predicted are IGNORE."""
        num_tokens, can_be = len(tokens), ~np.isin(tokens, self.special_ids)
        is_target = can_be & (rng.random(num_tokens) < self.share)
        if can_be.any() and not is_target.any():
            is_target[rng.choice(np.flatnonzero(can_be))] = True
        drawn, random_tokens = rng.random(num_tokens), rng.integers(self.vocab_size, size=num_tokens)
        is_hidden = is_target & (drawn < HIDDEN_SHARE)
        is_replaced = is_target & (drawn >= 1 - REPLACED_SHARE)
        inputs = np.where(is_hidden, self.mask_id, np.where(is_replaced, random_tokens, tokens))
        return inputs, np.where(is_target, tokens, IGNORE)


@final
@dataclass(frozen=True)
class Masker:
    """Makes a sample of the tokens of a text: puts marks around them, hides some, and pads to `padded_length`."""

    masking: Masking
    marks: tuple[np.ndarray, np.ndarray]
    padded_length: int
    pad_id: int
    stream: Stream
    seed: int

    def sample(self, tokens: np.ndarray, index: int, epoch: int) -> tuple[dict[str, Tensor], Tensor]:
        whole = np.concatenate([self.marks[0], tokens, self.marks[1]]).astype(np.int64)
        inputs, found = self.masking(whole, generator(self.stream, self.seed, epoch, index))
        targets = np.full(self.padded_length, IGNORE, np.int64)
        targets[: len(found)] = found
        return TextRules(self.pad_id).filled(inputs, self.padded_length), torch.from_numpy(targets)


def as_masked(samples: Samples, masker: Masker) -> Samples:
    """The samples of tokens as samples of a masked language model."""
    return MaskedTexts(samples, masker) if isinstance(samples, Texts) else MaskedWindows(samples, masker)


@final
class MaskedWindows(Samples):
    """Windows of text, all of one length."""

    def __init__(self, windows: Samples, masker: Masker) -> None:
        self.windows, self.masker = windows, masker

    def __len__(self) -> int:
        return len(self.windows)

    def sample(self, index: int, epoch: int) -> tuple[dict[str, Tensor], Tensor]:
        return self.masker.sample(self.windows.sample(index, epoch)[0].numpy(), index, epoch)


@final
class MaskedTexts(Texts):
    """Texts of any length, each by itself."""

    def __init__(self, texts: Texts, masker: Masker) -> None:
        self.texts, self.masker, self.padded_length = texts, masker, masker.padded_length

    def __len__(self) -> int:
        return len(self.texts)

    def length(self, index: int, epoch: int) -> int:
        return self.texts.length(index, epoch) + sum(map(len, self.masker.marks))

    def sample(self, index: int, epoch: int) -> tuple[dict[str, Tensor], Tensor]:
        tokens = self.texts.sample(index, epoch)[0][: self.texts.length(index, epoch)]
        return self.masker.sample(tokens.numpy(), index, epoch)


def masked_source(source: TokenSource, model: FollowedModel) -> MaskedSource | None:
    """The source for a masked language model; None for any other model."""
    return MaskedSource(source, model.text_rules) if model.modality is Modality.MASKED_TOKENS else None
