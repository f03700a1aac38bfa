"""What a model has to know of its data before it is built."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Modality(Enum):
    """What a sample is."""

    TOKENS = "tokens"
    IMAGES = "images"


@dataclass(frozen=True)
class DataSpec:
    """The shape of one sample's inputs, and how many classes its targets have.

    modality     TOKENS                        IMAGES
    num_classes  size of the vocabulary        classes
    shape        (sequence_length,)            (channels, height, width)
    """

    modality: Modality
    num_classes: int
    shape: tuple[int, ...]
