"""data=synthetic: random samples of fixed shapes, at no cost. For measuring; nothing can be learnt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch import Tensor

from lowvram.config.errors import BadInput, require
from lowvram.core.rig import IGNORE
from lowvram.data.masking import MASKED_SHARE
from lowvram.data.randomness import Stream, generator
from lowvram.data.source import Data, FollowedModel, ResolvedSource, Samples, Source, followed_modality, require_count
from lowvram.data.spec import DECODER_IDS, IDS, MASK, TEXTS, DataSpec, Modality, TextRules, pairs_layout

NUM_SAMPLES = 65_536  # in an epoch
POOL_SIZE = 32  # different samples in memory; the others are views of them
VOCABULARY = 256  # when neither the source nor the model fixes it
NUM_CLASSES = {Modality.LABELLED_TOKENS: 2, Modality.IMAGES: 1000}  # likewise


@final
@dataclass(frozen=True)
class Synthetic(Source):
    """Random tokens or images: whatever the model reads, in its natural shape and number of classes.

    Raises:
        BadInput: a value out of range.
    """

    modalities: ClassVar[tuple[Modality, ...]] = (*TEXTS, Modality.IMAGES)

    sequence_length: int | None = None
    target_length: int | None = None
    image_size: int | None = None
    vocab_size: int | None = None
    num_classes: int | None = None
    eval_samples: int = 256

    def __post_init__(self) -> None:
        for name in ("sequence_length", "target_length", "image_size", "vocab_size", "num_classes"):
            require_count(f"data.{name}", getattr(self, name))
        require(self.eval_samples >= 1, "data.eval_samples", self.eval_samples, "at least 1")

    def resolve(self, model: FollowedModel) -> Source:
        modality = followed_modality("synthetic", model)
        # A model that doesn't fix these sizes has no such fields.
        vocab_size = self.vocab_size or getattr(model, "vocab_size", None) or VOCABULARY
        num_classes = self.num_classes or getattr(model, "num_classes", None) or NUM_CLASSES.get(modality, 0)
        if modality is Modality.IMAGES:
            channels, height, width = model.natural_shape()
            shape = (channels, self.image_size or height, self.image_size or width)
            return ResolvedSynthetic(DataSpec(modality, num_classes, shape), self.eval_samples)
        shape = (self.sequence_length or model.natural_shape()[0],)
        if modality is Modality.TOKENS:
            return ResolvedSynthetic(DataSpec(modality, vocab_size, shape), self.eval_samples)
        if modality is Modality.MASKED_TOKENS:
            return ResolvedSynthetic(DataSpec(modality, vocab_size, shape, is_padded=False), self.eval_samples)
        if modality is Modality.PAIRS:
            layout = pairs_layout(*shape, self.target_length or shape[0])
            spec = DataSpec(modality, vocab_size, shape, layout=layout, is_padded=False)
        else:
            spec = DataSpec(modality, num_classes, shape, vocab_size, is_padded=False)
        return ResolvedSynthetic(spec, self.eval_samples, model.text_rules)

    def open(self, seed: int) -> Data:
        raise BadInput("data", "synthetic", "resolved for a model first: call resolve_source")


@final
@dataclass(frozen=True)
class ResolvedSynthetic(ResolvedSource):
    """Random samples as `spec` describes them. Samples are views of a pool, whose first half is to train on."""

    spec: DataSpec
    eval_samples: int
    rules: TextRules = field(default_factory=TextRules)

    def open(self, seed: int) -> Data:
        inputs, targets = DRAWS[self.spec.modality](self.spec, self.rules, generator(Stream.POOL, seed))
        samples, half = list(zip(inputs, targets, strict=True)), POOL_SIZE // 2
        shape = "x".join(map(str, self.spec.shape))
        kind = f"synthetic {self.spec.modality.value} of shape {shape}, {self.spec.num_classes} classes"
        return Data(
            self.spec,
            train=Pool(samples[:half], NUM_SAMPLES),
            eval=Pool(samples[half:], self.eval_samples),
            description=f"{kind}: nothing can be learnt",
        )


Drawn = tuple[Iterable[Any], Tensor]  # inputs and targets of the samples of a pool


def tokens(spec: DataSpec, rules: TextRules, rng: np.random.Generator) -> Drawn:
    """Each target is the next token."""
    (length,) = spec.shape
    drawn = torch.from_numpy(rng.integers(spec.num_classes, size=(POOL_SIZE, length + 1)))
    return drawn[:, :-1], drawn[:, 1:]


def labelled_tokens(spec: DataSpec, rules: TextRules, rng: np.random.Generator) -> Drawn:
    """Without padding."""
    (length,) = spec.shape
    texts = rng.integers(spec.num_tokens, size=(POOL_SIZE, length))
    labels = torch.from_numpy(rng.integers(spec.num_classes, size=POOL_SIZE))
    return [rules.padded(text, length) for text in texts], labels


def masked_tokens(spec: DataSpec, rules: TextRules, rng: np.random.Generator) -> Drawn:
    """Without padding; some of the tokens are to be predicted."""
    shape = (POOL_SIZE, *spec.shape)
    drawn = torch.from_numpy(rng.integers(spec.num_tokens, size=shape))
    is_target = torch.from_numpy(rng.random(shape) < MASKED_SHARE)
    is_target[:, 0] = True
    return [{IDS: text, MASK: torch.ones_like(text)} for text in drawn], drawn.where(is_target, IGNORE)


def pairs(spec: DataSpec, rules: TextRules, rng: np.random.Generator) -> Drawn:
    """Without padding."""
    (length,) = spec.shape
    assert spec.layout is not None
    (target_length,) = spec.layout.targets.shape
    texts, targets = (rng.integers(spec.num_tokens, size=(POOL_SIZE, size)) for size in (length, target_length))
    written = [rules.decoded(target, target_length) for target in targets]
    inputs = [{**rules.filled(text, length), DECODER_IDS: ids} for text, (ids, _) in zip(texts, written, strict=True)]
    return inputs, torch.from_numpy(targets)


def images(spec: DataSpec, rules: TextRules, rng: np.random.Generator) -> Drawn:
    """Pixels of mean 0 and variance 1."""
    drawn = torch.from_numpy(rng.standard_normal((POOL_SIZE, *spec.shape), dtype=np.float32))
    return drawn, torch.from_numpy(rng.integers(spec.num_classes, size=POOL_SIZE))


DRAWS = {
    Modality.TOKENS: tokens,
    Modality.LABELLED_TOKENS: labelled_tokens,
    Modality.MASKED_TOKENS: masked_tokens,
    Modality.PAIRS: pairs,
    Modality.IMAGES: images,
}


@final
class Pool(Samples):
    """A few samples again and again."""

    def __init__(self, samples: list[tuple[Any, Tensor]], num_samples: int) -> None:
        self.samples, self.num_samples = samples, num_samples

    def __len__(self) -> int:
        return self.num_samples

    def sample(self, index: int, epoch: int) -> tuple[Any, Tensor]:
        return self.samples[index % len(self.samples)]
