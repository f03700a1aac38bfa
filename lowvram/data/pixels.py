"""Images as files hold them, decoded: upright, with the range that the numbers of their format have."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, ImageOps

from lowvram.config.errors import BadSample
from lowvram.results.files.regular import read_regular

# Colours of 8 bits, or one channel of floats from 0 to 255: a file with more than 8 bits a pixel keeps its precision.
MODES = ("RGB", "F")
# In these formats Pillow's mode I holds 16 bits, scaled to all of their range.
SCALED_FORMATS = ("PNG", "PPM")
ORIENTATION, BITS_PER_SAMPLE, PHOTOMETRIC, WHITE_IS_ZERO = 0x0112, 258, 262, 0  # tags of Exif and of TIFF
CHECKED = "data.check=decode data.skip_unreadable=true looks at all images before the first step, and skips such files"

# Above twice its limit Pillow refuses an image; between the two it would only print a warning for each.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


class Undecodable(BadSample):
    """An image can't be decoded. The message names it."""


def decoded(file: str | Path | BinaryIO, name: str, size: int) -> Image.Image:
    """The image, upright, in one of MODES. Raises Undecodable, with the `name`, when it can't be decoded.

    Args:
        size: of the images that are made of it, in pixels: a far larger JPEG is decoded at a fraction.
    """
    try:
        with Image.open(file) as image:
            image.draft("RGB", (2 * size, 2 * size))
            image.load()
            return deep(image) if image.mode[0] in "IF" else colours(image)
    except MemoryError:
        raise
    except Exception as error:  # Pillow's readers raise errors of any class for a broken file
        raise Undecodable(f"the image {name} can't be decoded ({error}): mend it or take it out; {CHECKED}") from error


def colours(image: Image.Image) -> Image.Image:
    """An image of 8 bits in RGB, upright."""
    upright = ImageOps.exif_transpose(image)
    # A palette may hold transparency, which only RGBA can take over.
    return (upright.convert("RGBA") if upright.mode == "P" else upright).convert("RGB")


def deep(image: Image.Image) -> Image.Image:
    """An image of more than 8 bits (Pillow's modes I;16, I and F), upright, black 0 and white 255. Raises ValueError if
    its format doesn't say which number is white."""
    tags = getattr(image, "tag_v2", {})
    shares = shares_of_white(image, tags)
    if tags.get(PHOTOMETRIC) == WHITE_IS_ZERO:
        shares = 1 - shares
    converted = Image.fromarray(np.float32(255) * shares.astype(np.float32))
    converted.getexif()[ORIENTATION] = image.getexif().get(ORIENTATION, 1)
    return ImageOps.exif_transpose(converted)


def shares_of_white(image: Image.Image, tags: Mapping[int, Any]) -> np.ndarray:
    """Black 0 and white 1, (height, width). Pillow itself would cut all numbers above 255 off."""
    values = np.asarray(image)
    if image.mode == "F":
        if not (values.min() >= 0 and values.max() <= 1):
            span = f"from {values.min():g} to {values.max():g}"
            raise ValueError(f"it holds floats {span}, and white is 1: save it with values from 0 to 1, or 16 bits")
        return values
    if image.mode.startswith("I;16"):
        (num_bits,) = tags.get(BITS_PER_SAMPLE, (16,))
        return values / (2**num_bits - 1)
    if image.format in SCALED_FORMATS:
        return values / (2**16 - 1)
    raise ValueError("it holds whole numbers of 32 bits, or with a sign, of which none is white: save it with 16 bits")


def read_bytes(path: str | Path, name: str) -> bytes:
    """The contents of an image's file. Raises Undecodable, with the `name`, when it can't be read."""
    try:
        return read_regular(Path(path))
    except OSError as error:
        raise Undecodable(f"the image {name} can't be read ({error}): mend it or take it out; {CHECKED}") from error
