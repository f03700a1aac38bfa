"""Which images can be used, found before the first step: by their headers and ends, or by decoding each once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from PIL import Image

from lowvram.data.pixels import Undecodable, decoded

T = TypeVar("T")
HINT = "mend it, take it out, or skip such files with data.skip_unreadable=true"
AT_ONCE = 1024  # images handed to the threads: the executor keeps an object of each
TAIL = 64  # bytes, zeros behind a JPEG's end among them


class Check(Enum):
    """How images are looked at before the first step. Users type the names."""

    headers = "each file's header and end"
    decode = "all of each image, once"


def faults_of(images: Iterable[T], read: Callable[[T], Path | BinaryIO], size: int, check: Check) -> list[str | None]:
    """What is wrong with each image; None: nothing.

    Args:
        read: an image's path, or its file.
        size: of the images that are made of them, in pixels.
    """
    faults, left = list[str | None](), iter(images)
    with ThreadPoolExecutor() as pool:
        while some := list(islice(left, AT_ONCE)):
            faults += pool.map(lambda image: fault_of(partial(read, image), size, check), some)
    return faults


def fault_of(read: Callable[[], Path | BinaryIO], size: int, check: Check) -> str | None:
    """What is wrong with an image; None: nothing.

    An image is also decoded where its end doesn't show that it is whole, or where its numbers tell their range.
    """
    try:
        file = read()
        with Image.open(file) as image:
            if check is Check.headers and image.mode not in ("I", "F") and is_whole(image):
                return None
        decoded(file, "", size)
    except MemoryError:
        raise
    except Undecodable as error:
        return str(error.__cause__ or error)
    except Exception as error:  # Pillow's readers raise errors of any class for a broken file
        return str(error) or type(error).__name__
    return None


def is_whole(image: Image.Image) -> bool:
    """Whether the end of an image's file is where its format has it. False if the format doesn't say."""
    ends = ENDS.get(image.format or "")
    stream: Any = image.fp  # pyright: ignore[reportAttributeAccessIssue]
    if ends is None or stream is None:
        return False
    num_bytes = stream.seek(0, 2)
    stream.seek(max(0, num_bytes - TAIL))
    tail = stream.read()
    stream.seek(0)
    return ends(image, num_bytes, stream.read(TAIL), tail)


def all_strips(image: Any, num_bytes: int, _: bytes, __: bytes) -> bool:
    """Whether a TIFF's strips or tiles lie in the file."""
    tags = image.tag_v2
    places, lengths = (273, 279) if 273 in tags else (324, 325)
    ends = [place + length for place, length in zip(tags.get(places, ()), tags.get(lengths, ()), strict=False)]
    return bool(ends) and max(ends) <= num_bytes


def counted(start: int, more: int) -> Callable[[Any, int, bytes, bytes], bool]:
    """Whether the file has as many bytes as the four at `start` of its header say, and `more`."""
    return lambda _, num_bytes, head, __: int.from_bytes(head[start : start + 4], "little") + more <= num_bytes


ENDS: dict[str, Callable[[Any, int, bytes, bytes], bool]] = {  # image, bytes of its file, its first and its last bytes
    "JPEG": lambda _, __, ___, tail: tail.rstrip(b"\0").endswith(b"\xff\xd9"),
    "PNG": lambda _, __, ___, tail: tail.endswith(b"\0\0\0\0IEND\xaeB`\x82"),
    "GIF": lambda _, __, ___, tail: tail.rstrip(b"\0").endswith(b";"),
    "WEBP": counted(4, 8),
    "BMP": counted(2, 0),
    "TIFF": all_strips,
}
