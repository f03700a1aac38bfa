"""data=imagefolder: the user's images, one folder per class. The library `datasets` lists them.

Shapes: s side of the image in pixels, always square.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, final

import numpy as np
import torch
from omegaconf import MISSING
from PIL import Image, ImageOps
from torch import Tensor

from lowvram.config.errors import require
from lowvram.data.image_checks import Check, faults_of
from lowvram.data.image_listing import ClassFolder, class_folders, external_links, skipped_files
from lowvram.data.image_rules import ImageRules, image_rules_of
from lowvram.data.local import existing_path, load_local
from lowvram.data.numbering import numbered
from lowvram.data.pixels import decoded, read_bytes
from lowvram.data.randomness import Stream, generator
from lowvram.data.source import (
    Cache,
    Data,
    FollowedModel,
    ImageSource,
    ResolvedImageSource,
    Samples,
    Source,
    require_count,
    resolved_size,
)
from lowvram.data.spec import DataSpec, Modality
from lowvram.data.splits import evenly_spaced

Box = tuple[float, float, float, float]  # left, upper, right, lower, in pixels


@final
@dataclass(frozen=True)
class ImageFolder(ImageSource):
    """Images to classify. `path` holds a folder per class, or train/ and validation/ (val, eval, test) with a folder
    per class each. Without validation/ a tenth of each class is held out.

    Raises:
        BadInput: a value out of range; a path that is missing or empty, fewer than 2 classes, or a file that
            is named like an image and can't be read. The file is named.
    """

    modalities: ClassVar[tuple[Modality, ...]] = (Modality.IMAGES,)

    path: str = MISSING
    image_size: int | None = None
    min_area: float = 0.35
    flip: bool = True
    check: Check = Check.headers
    skip_unreadable: bool = False
    eval_samples: int = 256

    def __post_init__(self) -> None:
        require_count("data.image_size", self.image_size)
        require(0 < self.min_area <= 1, "data.min_area", self.min_area, "more than 0 and at most 1")
        require(self.eval_samples >= 1, "data.eval_samples", self.eval_samples, "at least 1")

    def check_paths(self) -> None:
        """Asked before any process starts, so it takes no torch."""
        existing_path(self.path)

    def resolve(self, model: FollowedModel) -> Source:
        size = self.image_size or model.natural_shape()[-1]
        return ResolvedImageSource(replace(self, image_size=size), image_rules_of(model))

    def open(self, seed: int) -> Data:
        return self.read_images(ImageRules(), seed)

    def read_images(self, rules: ImageRules, seed: int) -> Data:
        size = resolved_size("data.image_size", self.image_size)
        folders = class_folders(self.path, self.skip_unreadable, lambda files: faults_of(files, Path, size, self.check))
        files, (train_rows, eval_rows) = read_listing(self.path, folders)
        eval_rows = evenly_spaced(eval_rows, self.eval_samples)
        num_classes = len(files.classes)
        names, numbers = numbered(files.classes, rules.class_names)
        files = replace(files, labels=numbers[files.labels])
        crop = RandomCrop(self.min_area, self.flip, seed)
        description = (
            f"images of {self.path}: {num_classes} classes, {len(train_rows)} to train on,"
            f" {len(eval_rows)} held out, {size}x{size} pixels{skipped_files(folders)}{external_links(folders)}"
        )
        return Data(
            DataSpec(Modality.IMAGES, len(names), (3, size, size), class_names=names),
            train=CroppedImages(files, train_rows, size, crop, rules),
            eval=CroppedImages(files, eval_rows, size, center_crop, rules),
            description=description,
        )


@final
@dataclass(frozen=True)
class ImageFiles:
    """All images, train and eval: Arrow columns that `datasets` keeps on disk."""

    paths: Any  # pyarrow.ChunkedArray of strings
    labels: np.ndarray  # (num_images,) int64
    classes: list[str]

    def load(self, row: int, size: int) -> Image.Image:
        """The image, as `pixels.decoded`. Raises Undecodable, naming the file, when it can't be decoded."""
        path = self.paths[row].as_py()
        return decoded(path, path, size)

    def encoded(self, row: int) -> tuple[bytes, str]:
        path = self.paths[row].as_py()
        return read_bytes(path, path), path


class Images(Protocol):
    """Images and their classes, by row."""

    @property
    def labels(self) -> np.ndarray: ...

    def load(self, row: int, size: int) -> Image.Image:
        """The image, as `pixels.decoded`. Raises Undecodable, naming it, when it can't be decoded."""
        ...

    def encoded(self, row: int) -> tuple[bytes, str]:
        """The file's contents, and what to call it in messages."""
        ...


@final
class CroppedImages(Samples):
    """The images of some rows, scaled to `size`; `crop` chooses a part of each, and whether it is mirrored; `rules` say
    what numbers pixels become."""

    is_decoded = True

    def __init__(self, files: Images, rows: np.ndarray, size: int, crop: Crop, rules: ImageRules) -> None:
        self.files, self.rows, self.size, self.crop, self.rules = files, rows, size, crop, rules

    def __len__(self) -> int:
        return len(self.rows)

    def through(self, cache: Cache) -> CroppedImages:
        return CroppedImages(cache.around(self.files), self.rows, self.size, self.crop, self.rules)

    def sample(self, index: int, epoch: int) -> tuple[Tensor, Tensor]:
        row = int(self.rows[index])
        image = self.files.load(row, self.size)
        box, mirrored = self.crop(image.width, image.height, epoch, index)
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box, reducing_gap=2.0)
        values = np.asarray(ImageOps.mirror(image) if mirrored else image, np.float32)
        values_ss3 = values if values.ndim == 3 else np.repeat(values[..., None], 3, axis=2)
        image_3ss = torch.from_numpy(np.ascontiguousarray(self.rules.scaled(values_ss3).transpose(2, 0, 1)))
        return image_3ss, torch.tensor(int(self.files.labels[row]))


Crop = Callable[[int, int, int, int], tuple[Box, bool]]  # width, height, epoch, index -> part of the image, mirrored?


@final
@dataclass(frozen=True)
class RandomCrop:
    """A random part of the image, of random area and aspect ratio (Szegedy et al., 2015, "Going deeper with
    convolutions")."""

    min_area: float
    flip: bool
    seed: int

    def __call__(self, width: int, height: int, epoch: int, index: int) -> tuple[Box, bool]:
        rng = generator(Stream.TRAIN, self.seed, epoch, index)
        area = width * height * rng.uniform(self.min_area, 1)
        aspect = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
        wide, high = min(width, (area * aspect) ** 0.5), min(height, (area / aspect) ** 0.5)
        left, upper = rng.uniform(0, width - wide), rng.uniform(0, height - high)
        return (left, upper, left + wide, upper + high), self.flip and bool(rng.random() < 0.5)


def center_crop(width: int, height: int, epoch: int, index: int) -> tuple[Box, bool]:
    """The largest square in the middle of the image, the same in every epoch."""
    side = min(width, height)
    left, upper = (width - side) / 2, (height - side) / 2
    return (left, upper, left + side, upper + side), False


def read_listing(path: str, folders: dict[str, list[ClassFolder]]) -> tuple[ImageFiles, tuple[np.ndarray, np.ndarray]]:
    """The images of the class folders as Arrow columns, and the rows of each split."""
    import pyarrow

    patterns = {split: [name for folder in inner for name in folder.patterns()] for split, inner in folders.items()}
    splits = load_local("imagefolder", patterns, drop_labels=False, drop_metadata=True)
    tables = [splits[split].data.table for split in folders]
    for split, inner in folders.items():
        check_listed(path, inner, splits[split])
    columns = pyarrow.concat_tables(tables)
    paths = pyarrow.chunked_array([chunk.field("path") for chunk in columns.column("image").chunks])
    labels = columns.column("label").to_numpy()
    files = ImageFiles(paths, labels, splits["train"].features["label"].names)
    if len(tables) == 2:
        num_train = len(tables[0])
        return files, (np.arange(num_train), np.arange(num_train, len(labels)))
    held_out = held_out_tenth([Path(name).name for name in paths.to_pylist()], labels)
    require(
        bool(held_out.any()),
        "data.path",
        path,
        "a folder in which a class has at least 2 images, so that one can be held out",
    )
    return files, (np.flatnonzero(~held_out), np.flatnonzero(held_out))


def check_listed(path: str, folders: list[ClassFolder], listed: Any) -> None:
    """Raises BadInput unless `datasets` listed just the images of the class folders, each with its folder's name."""
    names, numbers = listed.features["label"].names, listed.data.table.column("label").to_numpy()
    counts = dict(zip(names, np.bincount(numbers, minlength=len(names)).tolist(), strict=True))
    for folder in folders:
        count, wanted = counts.get(folder.path.name, 0), len(folder.images)
        allowed = (
            f"a folder whose images `datasets` can list: of the {wanted} of {folder.path} it lists {count}; rename what"
            " has an unusual name, and change nothing while they are read"
        )
        require(count == wanted, "data.path", path, allowed)


def held_out_tenth(names: list[str], labels: np.ndarray) -> np.ndarray:
    """Which images are held out, (num_images,) bool.

    In each class the tenth with the smallest hashes of their names is: at least one, but never all.
    """
    hashes = np.array([zlib.crc32(name.encode()) for name in names])
    held_out = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        num_held = min(max(1, len(rows) // 10), len(rows) - 1)
        held_out[rows[np.argsort(hashes[rows], kind="stable")[:num_held]]] = True
    return held_out
