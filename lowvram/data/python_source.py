"""data=python_source: the source code of Python's own library. Real text that every machine has."""

from __future__ import annotations

import os
import platform
import sysconfig
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, final

import numpy as np

from lowvram.config.errors import BadInput, require
from lowvram.data.source import Data, FollowedModel, Source, require_count, resolved_size
from lowvram.data.spec import Modality
from lowvram.data.tokenizer import Bytes
from lowvram.data.windows import TokenStream, windowed
from lowvram.results.files.regular import read_regular

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
HELD_OUT_SHARE = 10  # one file in 10, and one byte in 10


@final
@dataclass(frozen=True)
class PythonSource(Source):
    """The next byte of the standard library's `.py` files. A tenth of the files is held out.

    Raises:
        BadInput: a value out of range, `max_bytes` too small for a sample, or a Python without its source.
    """

    modalities: ClassVar[tuple[Modality, ...]] = (Modality.TOKENS,)

    sequence_length: int | None = None
    max_bytes: int = 8_000_000
    eval_samples: int = 256

    def __post_init__(self) -> None:
        require_count("data.sequence_length", self.sequence_length)
        require(self.max_bytes >= 1, "data.max_bytes", self.max_bytes, "at least 1 byte")
        require(self.eval_samples >= 1, "data.eval_samples", self.eval_samples, "at least 1")

    def resolve(self, model: FollowedModel) -> Source:
        return replace(self, sequence_length=self.sequence_length or model.natural_shape()[0])

    def open(self, seed: int) -> Data:
        length = resolved_size("data.sequence_length", self.sequence_length)
        files = library_files()
        if not files:
            allowed = "another source: this Python came without its library's source code"
            raise BadInput("data", "python_source", allowed)
        held_bytes = self.max_bytes // HELD_OUT_SHARE
        train = read(self.max_bytes - held_bytes, (path for name, path in files.items() if not is_held_out(name)))
        held_out = read(held_bytes, (path for name, path in files.items() if is_held_out(name)))
        allowed = (
            f"enough for data.sequence_length={length}: it leaves {len(train)} bytes to train on and"
            f" {len(held_out)} held out, and one sample takes {length + 1} of each"
        )
        require(length < min(len(train), len(held_out)), "data.max_bytes", self.max_bytes, allowed)
        origin = f"source code of Python {platform.python_version()}'s library"
        return windowed(train, held_out, Bytes(), length, self.eval_samples, seed, origin)


def library_files() -> dict[str, Path]:
    """The library's `.py` files by their relative path, sorted, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    files = {}
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in SKIPPED_FOLDERS]
        paths = (Path(folder, name) for name in names if name.endswith(".py"))
        files |= {path.relative_to(root).as_posix(): path for path in paths}
    return dict(sorted(files.items()))


def is_held_out(name: str) -> bool:
    """A tenth of the files, chosen by name: the same files whatever else the library holds."""
    return zlib.crc32(name.encode()) % HELD_OUT_SHARE == 0


def read(max_bytes: int, files: Iterable[Path]) -> TokenStream:
    """The first `max_bytes` bytes of the files, or all of them."""
    text = bytearray()
    for file in files:
        text += read_regular(file)
        if len(text) >= max_bytes:
            break
    return TokenStream([np.frombuffer(text[:max_bytes], np.uint8)])
