"""What an image processor that comes with a model of transformers does to pixels: found by processing plain colours, as
processors name, order and leave out their settings in ways of their own."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from lowvram.compat.hf_offline import hf_offline
from lowvram.compat.torch_modes import without_dispatch_modes
from lowvram.config.errors import BadInput
from lowvram.config.texts import first_line
from lowvram.core.mesh import tell
from lowvram.core.quiet import quiet
from lowvram.data.image_rules import ImageRules, PixelScale
from lowvram.models.hf_source import folder, is_folder, transformers

FILE, SHARED_FILE = "preprocessor_config.json", "processor_config.json"  # the second one also holds a tokenizer's, say
SIZES = ("size", "crop_size")  # entries of processors that hold pixels
SIDE = 64  # pixels, of the images that are tried
BLACK, RED, GREEN, BLUE = (0, 0, 0), (255, 0, 0), (0, 255, 0), (0, 0, 255)
OTHERS = (255, 255, 255), (128, 128, 128), (200, 30, 90), (10, 250, 140)  # that what is found is checked with
TOLERANCE = 1e-4


class Processing(NamedTuple):
    """What an image processor does."""

    scale: PixelScale | None  # None: the usual one
    image_size: int | None  # of the images that it makes, in pixels; None: as large as they are, or not square


@lru_cache(maxsize=16)
def processing_of(name: str, revision: str | None) -> Processing:
    """What the image processor of a model does, if one comes with it.

    Raises:
        BadInput: of `model.name`: it can't be read, or does more than to give each channel its own numbers.
    """
    processor = read_processor(name, revision)
    if processor is None:
        return Processing(None, None)
    values = np.array([BLACK, RED, GREEN, BLUE, *OTHERS], np.float32)
    try:
        with without_dispatch_modes(), torch.device("cpu"), quiet():
            images = [Image.new("RGB", (SIDE, SIDE), tuple(map(int, colour))) for colour in values]
            pixels = processor(images, return_tensors="pt")["pixel_values"].double().numpy()
        height, width = pixels.shape[-2:]
        scale = scale_between(values, pixels[:, :, height // 2, width // 2])
    except Exception as error:  # a processor raises what it likes
        raise unfit(name, first_line(error)) from None
    is_sized = height == width and (height, width) != (SIDE, SIDE)
    return Processing(scale, height if is_sized else None)


def read_processor(name: str, revision: str | None) -> Any | None:
    """The image processor that comes with a model; None if there is none."""
    if is_folder(name) and not has_processor(folder(name)):
        return None
    where = str(folder(name)) if is_folder(name) else name
    try:
        with nullcontext() if is_folder(name) else hf_offline(), quiet():
            return transformers.AutoImageProcessor.from_pretrained(where, revision=revision, trust_remote_code=False)
    except Exception as error:
        if is_folder(name) or not isinstance(error, OSError):
            raise unfit(name, first_line(error)) from None
        told = f"no {FILE} could be read from the hub, so pixels are scaled by ImageNet's mean and deviation"
        tell(f"model.name={name}: {told}")
        return None


def has_processor(where: Path) -> bool:
    """Whether a folder has the settings of an image processor."""
    if (where / FILE).is_file():
        return True
    try:
        return "image_processor" in json.loads((where / SHARED_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False


def unfit(name: str, why: str) -> BadInput:
    allowed = f"a model whose {FILE} says what number each channel of a pixel becomes: {why}; without that file"
    return BadInput("model.name", name, f"{allowed}, in a copy of the folder, pixels are scaled as ImageNet's")


def scale_between(values: np.ndarray, pixels: np.ndarray) -> PixelScale | None:
    """The scale that makes `pixels`, (num_colours, 3), of `values`, whose first four rows are BLACK, RED, GREEN, BLUE;
    None: the usual one.

    Raises:
        ValueError: none does.
    """
    if are_close(ImageRules().scaled(values), pixels):
        return None
    offsets, slopes = pixels[0], (pixels[1:4] - pixels[0]) / 255  # slopes: (of a colour's channel, of a model's)
    channels = np.abs(slopes).argmax(0)
    factors = slopes[channels, range(3)]
    scale = PixelScale(*(tuple(each.tolist()) for each in (channels, factors, offsets)))
    if not are_close(scale.scaled(values), pixels):
        raise ValueError("what it makes of a channel depends on others, or isn't a multiple and a sum")
    return scale


def are_close(first: np.ndarray, second: np.ndarray) -> bool:
    return np.allclose(first, second, rtol=TOLERANCE, atol=TOLERANCE)


def write_size(where: Path, image_size: int) -> None:
    """Have the image processor in a folder make images of this size, in pixels: a model was trained with it."""
    before = processing_of(str(where), None)
    if before.image_size in (None, image_size):
        return
    path = where / FILE if (where / FILE).is_file() else where / SHARED_FILE
    values = json.loads(path.read_bytes())
    settings = values if path.name == FILE else values["image_processor"]
    named = {name: settings[name] for name in SIZES if settings.get(name) is not None}
    settings |= {name: in_proportion(value, image_size, before.image_size) for name, value in named.items()}
    path.write_text(json.dumps(values, indent=2) + "\n")
    processing_of.cache_clear()
    if processing_of(str(where), None) != before._replace(image_size=image_size):
        tell(f"{path}: the images that it makes aren't of {image_size} pixels, which the model was trained with")


def in_proportion(value: Any, new: int, old: int) -> Any:
    """A size, or several by their names, with `new` pixels for `old` ones."""
    if isinstance(value, dict):
        return {name: in_proportion(each, new, old) for name, each in value.items()}
    return round(value * new / old) if isinstance(value, int) else value
