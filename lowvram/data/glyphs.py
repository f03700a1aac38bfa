"""data=glyphs: characters drawn on the fly, at any size. Images that every machine has.

Shapes: s side of the image in pixels, always square.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import cos, radians, sin
from typing import ClassVar, final

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from lowvram.config.errors import require
from lowvram.data.randomness import Stream, generator
from lowvram.data.source import Data, FollowedModel, Samples, Source, resolved_size
from lowvram.data.spec import DataSpec, Modality

# Without I and O (1 and 0), and only such small letters as stay apart at any size, as in EMNIST
# (Cohen et al., 2017).
CHARACTERS = "0123456789" + "ABCDEFGHJKLMNPQRSTUVWXYZ" + "adefhnrt"
MIN_IMAGE_SIZE = 8  # pixels; characters can't be told apart below
FONT_SHARE = 0.75  # size of the font as a share of the image's side, on average
NOISE = np.float32(0.1)  # its range, where pixels run from 0 (black) to 1 (white)
PIXEL_MEAN, PIXEL_STD = np.float32(0.25), np.float32(0.2)  # approximately, of all pixels


@final
@dataclass(frozen=True)
class Glyphs(Source):
    """Images of 42 characters to tell apart. Place, size, slant, colours and noise are random, and new in every epoch.

    Raises:
        BadInput: a value out of range.
    """

    modalities: ClassVar[tuple[Modality, ...]] = (Modality.IMAGES,)

    image_size: int | None = None
    num_samples: int = 50_000
    eval_samples: int = 256

    def __post_init__(self) -> None:
        size = self.image_size
        legible = f"null or at least {MIN_IMAGE_SIZE} pixels: smaller characters can't be told apart"
        require(size is None or size >= MIN_IMAGE_SIZE, "data.image_size", size, legible)
        require(self.num_samples >= 1, "data.num_samples", self.num_samples, "at least 1")
        require(self.eval_samples >= 1, "data.eval_samples", self.eval_samples, "at least 1")

    def resolve(self, model: FollowedModel) -> Source:
        return replace(self, image_size=self.image_size or model.natural_shape()[-1])

    def open(self, seed: int) -> Data:
        size = resolved_size("data.image_size", self.image_size)
        masks = [mask(character, size) for character in CHARACTERS]
        description = f"drawn characters: {len(masks)} classes, {self.num_samples} samples of {size}x{size} pixels"
        return Data(
            DataSpec(Modality.IMAGES, len(masks), (3, size, size), class_names=tuple(CHARACTERS)),
            train=DrawnGlyphs(masks, self.num_samples, Stream.TRAIN, seed),
            eval=DrawnGlyphs(masks, self.eval_samples, Stream.EVAL, seed),
            description=f"{description}; {self.eval_samples} samples held out",
        )


@final
class DrawnGlyphs(Samples):
    """Sample i shows character i modulo their number, so classes are balanced."""

    def __init__(self, masks: list[Image.Image], num_samples: int, stream: Stream, seed: int) -> None:
        self.masks, self.num_samples, self.stream, self.seed = masks, num_samples, stream, seed

    def __len__(self) -> int:
        return self.num_samples

    def sample(self, index: int, epoch: int) -> tuple[Tensor, Tensor]:
        label = index % len(self.masks)
        image_3ss = draw(self.masks[label], generator(self.stream, self.seed, epoch, index))
        return torch.from_numpy(image_3ss), torch.tensor(label)


def mask(character: str, size: int) -> Image.Image:
    """The character in white on black, upright, in the middle. The font is the one inside Pillow."""
    image = Image.new("L", (size, size))
    font = ImageFont.load_default(FONT_SHARE * size)
    ImageDraw.Draw(image).text((size / 2, size / 2), character, fill=255, font=font, anchor="mm")
    return image


def draw(upright: Image.Image, rng: np.random.Generator) -> np.ndarray:
    """One random view of a character, bright on dark: (3, s, s) float32 of about mean 0 and variance 1."""
    size = upright.width
    scale, angle = rng.uniform(0.8, 1.2), radians(rng.uniform(-15, 15))
    shift_x, shift_y = rng.uniform(-0.08, 0.08, 2) * size
    # Pillow wants the inverse map: from a pixel of the view to a point of the upright image.
    a, b = cos(angle) / scale, sin(angle) / scale
    x, y = size / 2 + shift_x, size / 2 + shift_y
    back = (a, b, size / 2 - a * x - b * y, -b, a, size / 2 + b * x - a * y)
    view = upright.transform((size, size), Image.Transform.AFFINE, back, Image.Resampling.BILINEAR)

    paper = rng.uniform(0, 0.4, (3, 1, 1)).astype(np.float32)
    ink = rng.uniform(0.6, 1, (3, 1, 1)).astype(np.float32)
    noise_3ss = rng.random((3, size, size), dtype=np.float32) - np.float32(0.5)
    ink_ss = np.asarray(view, np.float32) / 255
    image_3ss = paper + ink_ss * (ink - paper) + NOISE * noise_3ss
    return (image_3ss - PIXEL_MEAN) / PIXEL_STD
