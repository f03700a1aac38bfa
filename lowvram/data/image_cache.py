"""loader.cache: images are decoded once and their pixels kept, in memory or on disk. All that is random, such as which
part of an image is cut out, comes after that, so batches are the same as without a cache.

Pixels are those that `pixels.decoded` makes: three bytes each in RGB, four in F.
"""

from __future__ import annotations

import hashlib
import mmap
import multiprocessing
import os
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
import torch
from PIL import Image, features

from lowvram.config.cache_folder import cache_folder
from lowvram.config.errors import BadInput, Shortage
from lowvram.core.free_memory import free_host_bytes
from lowvram.core.mesh import data_ranks
from lowvram.data.imagefolder import Images
from lowvram.data.pixels import MODES, decoded
from lowvram.results.files.durable import write
from lowvram.results.files.regular import read_regular

LOCK_S = 1.0  # a process that is killed while it counts mustn't stop the others: they go on without the cache
SHAPE = struct.Struct("<BII")  # mode (its number in MODES), width and height, before the pixels of an image
PIXEL_BYTES = {"RGB": 3, "F": 4}


class Counts(NamedTuple):
    """Of all processes of a rank."""

    held_bytes: int  # that they have put into the cache
    num_hits: int  # images that came from the cache
    num_misses: int  # images that were decoded


@final
class Tally:
    """Counts in memory that a rank shares with its workers, which are forked later."""

    def __init__(self) -> None:
        self.numbers = np.frombuffer(shared_memory(8 * len(Counts._fields)), np.int64)
        try:
            self.lock = multiprocessing.get_context("fork").Lock()
        except OSError as error:
            where = "/dev/shm, in which processes share locks, is full"
            raise Shortage(f"loader.cache can't be used ({error}): {where}; loader.cache=none needs none") from None

    def counts(self) -> Counts:
        """So far."""
        return Counts(*self.numbers.tolist())

    def add(self, more: Counts, limit: int | None = None) -> int | None:
        """Add to the counts; returns the bytes that were held before. None, without adding anything, if more than
        `limit` bytes would be held, or if another process has died while it counted."""
        if not self.lock.acquire(timeout=LOCK_S):
            return None
        try:
            before = self.counts()
            if limit is not None and before.held_bytes + more.held_bytes > limit:
                return None
            self.numbers += np.array(more, np.int64)
            return before.held_bytes
        finally:
            self.lock.release()


class ImageCache(ABC):
    """Decoded images of one rank. When no more than `limit_bytes` can be added, further images are decoded each time:
    as every image comes once in an epoch, one that took the place of another would be of no more use.

    Args:
        limit_bytes: of the options, what the images of all ranks may take together.
        folder: `loader.cache_folder`.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes, self.tally = limit_bytes, Tally()

    @abstractmethod
    def around(self, images: Images) -> Images:
        """The same images, through the cache."""

    def counts(self) -> Counts:
        """So far, of this rank."""
        return self.tally.counts()

    def figures(self, device: torch.device) -> Mapping[str, float]:
        """What the caches of all ranks hold, and the share of images that came from them. A collective."""
        counts = torch.tensor(self.counts(), device=device)
        held_bytes, num_hits, num_misses = data_ranks().sum(counts).tolist()
        return {"data.cache_bytes": held_bytes, "data.cache_hit_frac": num_hits / max(1, num_hits + num_misses)}


@final
class Memory(ImageCache):
    """Pixels in memory that all workers of a rank share: mapped before they are forked. Images are told apart by their
    row, as the data set stays the same while a run reads it."""

    def __init__(self, limit_bytes: int, _: str | None = None) -> None:
        super().__init__(min(limit_bytes, free_host_bytes() // 2) // data_ranks().size)
        self.pixels = shared_memory(self.limit_bytes)

    def around(self, images: Images) -> Images:
        return InMemory(images, self)


@final
class InMemory:
    """Images of which some are in memory."""

    def __init__(self, images: Images, cache: Memory) -> None:
        self.images, self.labels, self.cache = images, images.labels, cache
        # Where each image begins, counted from 1; 0: it isn't there.
        self.places = np.frombuffer(shared_memory(8 * len(images.labels)), np.int64)

    def load(self, row: int, size: int) -> Image.Image:
        if place := int(self.places[row]):
            self.cache.tally.add(Counts(0, 1, 0))
            return image_at(self.cache.pixels, place - 1)
        image = self.images.load(row, size)
        self.keep(row, image)
        return image

    def encoded(self, row: int) -> tuple[bytes, str]:
        return self.images.encoded(row)

    def keep(self, row: int, image: Image.Image) -> None:
        entry = SHAPE.pack(MODES.index(image.mode), *image.size) + image.tobytes()
        place = self.cache.tally.add(Counts(len(entry), 0, 1), self.cache.limit_bytes)
        if place is None:
            self.cache.tally.add(Counts(0, 0, 1))
            return
        self.cache.pixels[place : place + len(entry)] = entry
        self.places[row] = place + 1  # only now may others read it


def image_at(memory: mmap.mmap, place: int) -> Image.Image:
    """The image whose shape and pixels begin at a place."""
    number, width, height = SHAPE.unpack_from(memory, place)
    mode, first = MODES[number], place + SHAPE.size
    return Image.frombytes(mode, (width, height), memory[first : first + PIXEL_BYTES[mode] * width * height])


def shared_memory(num_bytes: int) -> mmap.mmap:
    """Zeros that a process shares with those that it forks. Pages that nobody writes take no memory.

    Raises:
        BadInput: the system doesn't give so much.
    """
    try:
        return mmap.mmap(-1, max(1, num_bytes))
    except OSError as error:
        allowed = f"smaller: the system doesn't give {num_bytes:,} bytes ({error.strerror})"
        raise BadInput("loader.cache_limit", f"{num_bytes} bytes", allowed) from None


HEADER = struct.Struct("<8sBIII")  # MAGIC, mode (its number in MODES), width, height and the CRC-32 of the pixels
MAGIC = b"lowvram2"  # to be changed when `pixels.decoded`, or these files, change


@final
class Disk(ImageCache):
    """Pixels in a folder, one file an image, which other runs share.

    A file is named by a hash of the encoded image's bytes and of all that its pixels depend on. So whatever happens to
    the user's files, no pixels are taken for those of another image, as they might be if a name, a size and a time told
    images apart; the encoded file is read each time for it. A file is written under another name, flushed and renamed.
    One that is damaged is decoded and written anew. Nothing is ever removed.
    """

    def __init__(self, limit_bytes: int, folder: str | None) -> None:
        self.folder = opened_folder(folder)
        super().__init__(max(0, limit_bytes - folder_bytes(self.folder)) // data_ranks().size)

    def counts(self) -> Counts:
        """So far. Rank 0 tells what the folder holds, of all runs."""
        return super().counts()._replace(held_bytes=0 if data_ranks().rank else folder_bytes(self.folder))

    def around(self, images: Images) -> Images:
        return OnDisk(images, self)


@final
class OnDisk:
    """Images of which some are in a folder."""

    def __init__(self, images: Images, cache: Disk) -> None:
        self.images, self.labels, self.cache = images, images.labels, cache

    def load(self, row: int, size: int) -> Image.Image:
        content, name = self.encoded(row)
        path = path_of(self.cache.folder, content, size)
        image = read_entry(path)
        if image is not None:
            self.cache.tally.add(Counts(0, 1, 0))
            return image
        image = decoded(BytesIO(content), name, size)
        self.keep(path, image)
        return image

    def encoded(self, row: int) -> tuple[bytes, str]:
        return self.images.encoded(row)

    def keep(self, path: Path, image: Image.Image) -> None:
        pixels = image.tobytes()
        entry = HEADER.pack(MAGIC, MODES.index(image.mode), *image.size, zlib.crc32(pixels)) + pixels
        self.cache.tally.add(Counts(0, 0, 1))
        if self.cache.tally.add(Counts(len(entry), 0, 0), self.cache.limit_bytes) is None:
            return
        with suppress(OSError):  # a full disk: the image is decoded again next time
            path.parent.mkdir(exist_ok=True)
            write(path, lambda file: file.write(entry))


def path_of(folder: Path, content: bytes, size: int) -> Path:
    """The file of an image, in one of 256 folders."""
    name = hashlib.blake2b(repr((decoders(), size)).encode() + content, digest_size=16).hexdigest()
    return folder / name[:2] / f"{name}.pixels"


@cache
def decoders() -> tuple[str, ...]:
    """What decodes images, with versions."""
    libraries = (f"{name} {features.version(name)}" for name in sorted(features.get_supported()))
    return (MAGIC.decode(), f"Pillow {Image.__version__}", *libraries)


def read_entry(path: Path) -> Image.Image | None:
    """The image in a file; None if there is no such file, or if it isn't whole."""
    try:
        entry = read_regular(path)
        magic, number, width, height, checksum = HEADER.unpack_from(entry)
        mode = MODES[number]
    except (OSError, struct.error, IndexError):
        return None
    pixels, num_bytes = memoryview(entry)[HEADER.size :], PIXEL_BYTES[mode] * width * height
    is_whole = magic == MAGIC and len(pixels) == num_bytes > 0 and zlib.crc32(pixels) == checksum
    return Image.frombytes(mode, (width, height), pixels) if is_whole else None  # pyright: ignore[reportArgumentType]


def folder_bytes(folder: Path) -> int:
    """The bytes of all images in a folder."""
    total = 0
    for path in folder.glob("[0-9a-f][0-9a-f]/*.pixels"):
        with suppress(OSError):  # somebody has removed it
            total += path.stat().st_size
    return total


def default_folder() -> Path:
    return cache_folder() / "images"


def opened_folder(name: str | None) -> Path:
    """The folder for decoded images, made if it isn't there. Raises BadInput if nothing can be written there."""
    folder = default_folder() if name is None else Path(name).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except (OSError, RuntimeError, ValueError) as error:
        raise BadInput("loader.cache_folder", name, f"null or a folder that can be written ({error})") from None
    if not writable:
        raise BadInput("loader.cache_folder", name, f"null or a folder that can be written: {folder} can't")
    return folder


CACHES = {"memory": Memory, "disk": Disk}  # by the names of loader.CacheKind
