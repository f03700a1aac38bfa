"""Decoded images: whatever the format, black stays black and white white, and what can't be so is refused by name."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lowvram.data.image_rules import CHANNEL_MEAN, CHANNEL_STD, ImageRules
from lowvram.data.imagefolder import CroppedImages, ImageFiles, center_crop
from lowvram.data.pixels import Undecodable, decoded

SHARES = np.linspace(0, 1, 7 * 9).reshape(7, 9)  # of white


def grey(mode: str) -> Image.Image:
    """SHARES in a mode of Pillow with one channel."""
    if mode == "F":
        return Image.fromarray(SHARES.astype(np.float32))
    if mode == "I":
        return Image.fromarray((SHARES * 65535).astype(np.int32))
    if mode == "1":
        return Image.fromarray(SHARES > 0.5)
    if mode.startswith("I;16"):
        numbers = (SHARES * 65535).astype(">u2" if mode == "I;16B" else "<u2")
        return Image.frombytes(mode, (9, 7), numbers.tobytes())
    return Image.fromarray((SHARES * 255).astype(np.uint8)).convert(mode)


def saved(image: Image.Image, kind: str, **options: Any) -> BytesIO:
    file = BytesIO()
    image.save(file, kind, **options)
    return BytesIO(file.getvalue())


def shares(image: Image.Image) -> np.ndarray:
    """Of white, the mean of the channels, (height, width)."""
    pixels = np.asarray(image, np.float64) / 255
    return pixels if pixels.ndim == 2 else pixels.mean(-1)


def test_every_mode_keeps_its_range() -> None:
    kinds = [("PNG", mode) for mode in ("I;16", "I;16B", "L", "LA", "P", "RGB", "RGBA")]
    kinds += [("TIFF", mode) for mode in ("I;16", "I;16B", "F", "L", "LA", "RGB", "RGBA", "CMYK")]
    kinds += [("PPM", mode) for mode in ("I", "I;16", "F", "L", "RGB")] + [("JPEG2000", "I;16"), ("WEBP", "RGB")]
    for kind, mode in kinds:
        options = {"lossless": True} if kind == "WEBP" else {}
        made = shares(decoded(saved(grey(mode), kind, **options), "x", 8))
        assert abs(made - SHARES).max() < (0.02 if kind == "JPEG2000" else 0.0045), (kind, mode)
    black_and_white = shares(decoded(saved(grey("1"), "PNG"), "x", 8))
    assert np.array_equal(black_and_white, SHARES > 0.5)


def test_sixteen_bits_keep_their_precision() -> None:
    dark = Image.frombytes("I;16", (3, 1), np.array([0, 100, 101], "<u2").tobytes())
    assert np.allclose(shares(decoded(saved(dark, "PNG"), "x", 8)), [[0, 100 / 65535, 101 / 65535]], rtol=1e-5)


def test_a_palette_may_be_transparent() -> None:
    for transparency in (0, bytes(range(256))):
        made = decoded(saved(grey("L").quantize(64), "PNG", transparency=transparency), "x", 8)
        assert made.mode == "RGB"
        assert abs(shares(made) - SHARES).max() < 0.02


def test_white_may_be_zero() -> None:
    """TIFF's photometric interpretation 0."""
    for mode in ("I;16", "F"):
        file = saved(grey(mode), "TIFF", tiffinfo={262: 0})
        assert abs(shares(decoded(file, "x", 8)) - (1 - SHARES)).max() < 1e-4, mode


def test_what_has_no_white_is_refused_by_name() -> None:
    fine, numbers = SHARES.astype(np.float32), (SHARES * 200).astype(np.int32)
    for array in (fine * 255, fine - 0.5, np.full_like(fine, np.nan), np.full_like(fine, np.inf), numbers, -numbers):
        with pytest.raises(Undecodable, match=r"the image mine\.tif can't be decoded \(it holds .*: save it with"):
            decoded(saved(Image.fromarray(array), "TIFF"), "mine.tif", 8)


def test_deep_images_are_turned_too() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: turn it clockwise
    for kind, mode in (("PNG", "I;16"), ("TIFF", "I;16"), ("TIFF", "I;16B"), ("TIFF", "F"), ("PNG", "RGB")):
        turned = shares(decoded(saved(grey(mode), kind, exif=exif), "x", 8))
        assert abs(turned - np.rot90(SHARES, -1)).max() < 0.0045, (kind, mode)


def test_samples_of_deep_images_have_three_equal_channels(tmp_path: Path) -> None:
    Image.fromarray(np.full((20, 30), 50_000, np.uint16)).save(tmp_path / "x.png")
    import pyarrow

    files = ImageFiles(pyarrow.chunked_array([[str(tmp_path / "x.png")]]), np.array([1]), ["a", "b"])
    image, _ = CroppedImages(files, np.array([0]), 8, center_crop, ImageRules()).sample(0, 0)
    pixels = image.permute(1, 2, 0).numpy() * CHANNEL_STD + CHANNEL_MEAN
    assert np.allclose(pixels, 50_000 / 65535, atol=1e-5)
