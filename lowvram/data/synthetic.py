"""data=synthetic: random samples of fixed shapes, at no cost. For measuring; nothing can be learnt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
import torch
from torch import Tensor

from lowvram.config import BadInput, require
from lowvram.data.randomness import Stream, generator
from lowvram.data.source import Data, FollowedModel, Samples, Source, require_count
from lowvram.data.spec import DataSpec, Modality

NUM_SAMPLES = 65_536  # in an epoch
POOL_SIZE = 32  # different samples in memory; the others are views of them
PINNED_FIELD = {Modality.TOKENS: "vocab_size", Modality.IMAGES: "num_classes"}  # of a model's configuration
NUM_CLASSES = {Modality.TOKENS: 256, Modality.IMAGES: 1000}  # when neither the source nor the model says


@final
@dataclass(frozen=True)
class Synthetic(Source):
    """Random tokens or images: whatever the model reads, in its natural shape and number of classes.

    Raises:
        BadInput: a value out of range.
    """

    sequence_length: int | None = None
    image_size: int | None = None
    vocab_size: int | None = None
    num_classes: int | None = None
    eval_samples: int = 256

    def __post_init__(self) -> None:
        for name in ("sequence_length", "image_size", "vocab_size", "num_classes"):
            require_count(f"data.{name}", getattr(self, name))
        require(self.eval_samples >= 1, "data.eval_samples", self.eval_samples, "at least 1")

    def resolve(self, model: FollowedModel) -> Source:
        field = PINNED_FIELD[model.modality]
        pinned = getattr(model, field, None)  # a model that pins nothing need not have the field
        num_classes = getattr(self, field) or pinned or NUM_CLASSES[model.modality]
        if model.modality is Modality.TOKENS:
            shape = (self.sequence_length or model.natural_shape()[0],)
            return SyntheticTokens(DataSpec(Modality.TOKENS, num_classes, shape), self.eval_samples)
        channels, height, width = model.natural_shape()
        shape = (channels, self.image_size or height, self.image_size or width)
        return SyntheticImages(DataSpec(Modality.IMAGES, num_classes, shape), self.eval_samples)

    def open(self, seed: int) -> Data:
        raise BadInput("data", "synthetic", "resolved for a model first: see resolve_source")


@final
@dataclass(frozen=True)
class SyntheticTokens(Source):
    """Random tokens; the targets are the tokens one further on."""

    modality: ClassVar[Modality | None] = Modality.TOKENS

    spec: DataSpec
    eval_samples: int

    def resolve(self, model: FollowedModel) -> Source:
        return self

    def open(self, seed: int) -> Data:
        (length,) = self.spec.shape
        shape = (POOL_SIZE, length + 1)
        tokens = torch.from_numpy(generator(Stream.POOL, seed).integers(self.spec.num_classes, size=shape))
        return pooled(self.spec, tokens[:, :-1], tokens[:, 1:], self.eval_samples)


@final
@dataclass(frozen=True)
class SyntheticImages(Source):
    """Random pixels of mean 0 and variance 1; random classes."""

    modality: ClassVar[Modality | None] = Modality.IMAGES

    spec: DataSpec
    eval_samples: int

    def resolve(self, model: FollowedModel) -> Source:
        return self

    def open(self, seed: int) -> Data:
        rng = generator(Stream.POOL, seed)
        images = torch.from_numpy(rng.standard_normal((POOL_SIZE, *self.spec.shape), dtype=np.float32))
        labels = torch.from_numpy(rng.integers(self.spec.num_classes, size=POOL_SIZE))
        return pooled(self.spec, images, labels, self.eval_samples)


@final
class Pool(Samples):
    """A few samples again and again, as views: (pool size, ...) each."""

    def __init__(self, inputs: Tensor, targets: Tensor, num_samples: int) -> None:
        self.inputs, self.targets, self.num_samples = inputs, targets, num_samples

    def __len__(self) -> int:
        return self.num_samples

    def sample(self, index: int, epoch: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index % len(self.inputs)], self.targets[index % len(self.targets)]


def pooled(spec: DataSpec, inputs: Tensor, targets: Tensor, eval_samples: int) -> Data:
    """One half of the pool to train on, the other held out."""
    half = POOL_SIZE // 2
    shape = "x".join(map(str, spec.shape))
    kind = f"synthetic {spec.modality.value} of shape {shape}, {spec.num_classes} classes"
    return Data(
        spec,
        train=Pool(inputs[:half], targets[:half], NUM_SAMPLES),
        eval=Pool(inputs[half:], targets[half:], eval_samples),
        description=f"{kind}: nothing can be learnt",
    )
