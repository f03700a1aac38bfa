"""What a model asks of images: what numbers pixels become, and the classes that it knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np

# Of ImageNet's pixels in [0, 1].
CHANNEL_MEAN = np.array([0.485, 0.456, 0.406], np.float32)
CHANNEL_STD = np.array([0.229, 0.224, 0.225], np.float32)


@final
@dataclass(frozen=True)
class PixelScale:
    """The numbers that a model reads for the values 0 to 255 of a pixel: value · factor + offset, channel by channel.

    channels  of three numbers: which channel of red, green and blue (0, 1, 2) each of the model's is
    factors   of each of the model's channels
    offsets   likewise
    """

    channels: tuple[int, ...]
    factors: tuple[float, ...]
    offsets: tuple[float, ...]

    def scaled(self, values_ss3: np.ndarray) -> np.ndarray:
        """The model's numbers for pixels of (s, s, 3) float32."""
        ordered_ss3 = values_ss3[..., list(self.channels)]
        return ordered_ss3 * np.array(self.factors, np.float32) + np.array(self.offsets, np.float32)


@final
@dataclass(frozen=True)
class ImageRules:
    """What a model asks of images.

    scale        None: the usual one, by the mean and the deviation of ImageNet's pixels
    class_names  of a trained head, in the order of its logits; None: there is none
    """

    scale: PixelScale | None = None
    class_names: tuple[str, ...] | None = None

    def scaled(self, values_ss3: np.ndarray) -> np.ndarray:
        """The model's numbers for pixels from 0 to 255, (s, s, 3) float32."""
        if self.scale is not None:
            return self.scale.scaled(values_ss3)
        return (values_ss3 / 255 - CHANNEL_MEAN) / CHANNEL_STD


def image_rules_of(model: Any) -> ImageRules:
    """What a model that data follow asks of images. Most models ask nothing, and have no such attribute."""
    return getattr(model, "image_rules", ImageRules())
