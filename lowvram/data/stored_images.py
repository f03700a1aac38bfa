"""Images that a data set holds in a column: read from memory-mapped Arrow files, without copies of what isn't used."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from io import SEEK_CUR, SEEK_END, SEEK_SET, BufferedReader, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO, final

import numpy as np
from PIL import Image

from lowvram.config.errors import require
from lowvram.data.columns import mapped_value
from lowvram.data.pixels import Undecodable, decoded, read_bytes
from lowvram.data.text_and_label import is_text, require_column


@final
@dataclass(frozen=True)
class StoredImages:
    """Images in an Arrow column: their bytes, their paths, or both."""

    column: Any
    labels: np.ndarray
    root: Path

    def load(self, row: int, size: int) -> Image.Image:
        """The image, as `pixels.decoded`. Raises Undecodable, naming the row, when it can't be decoded."""
        return decoded(self.file(row), f"in row {row}", size)

    def encoded(self, row: int) -> tuple[bytes, str]:
        file, name = self.file(row), f"in row {row}"
        return (read_bytes(file, name) if isinstance(file, Path) else file.read()), name

    def file(self, row: int) -> Path | BinaryIO:
        """The image's path or, if the column holds its contents, these as a file of which only what is read is copied.
        Raises Undecodable where there is neither."""
        import pyarrow

        value = self.alone(row)
        is_struct = pyarrow.types.is_struct(value.type)
        fields = [value.field(name) for name in ("bytes", "path")] if is_struct else [value]
        for field in [] if value.null_count else fields:
            content = mapped_value(field)
            if content is not None and content.size:
                if "binary" in str(field.type):
                    return BufferedReader(MappedFile(memoryview(content).cast("B")))
                return self.root / content.to_pybytes().decode()
        raise Undecodable(f"row {row} has no image")

    def alone(self, row: int) -> Any:
        """An Arrow array of this row alone; nothing is copied."""
        number = int(np.searchsorted(self.ends, row, side="right"))
        chunk = self.column.chunk(number)
        return chunk.slice(row - int(self.ends[number]) + len(chunk), 1)

    @cached_property
    def ends(self) -> np.ndarray:
        """The row behind the last of each of the column's chunks: (num_chunks,) int64."""
        return np.cumsum([len(chunk) for chunk in self.column.chunks])


@final
class MappedFile(RawIOBase):
    """Mapped bytes as a file: only what is read is copied. As in BytesIO, one may seek past the end."""

    def __init__(self, content: memoryview) -> None:
        self.content, self.place = content, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        part = self.content[self.place : self.place + len(buffer)]
        buffer[: len(part)] = part
        self.place += len(part)
        return len(part)

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        if whence == SEEK_SET and offset < 0:
            raise ValueError(f"negative place {offset}")
        starts = {SEEK_SET: 0, SEEK_CUR: self.place, SEEK_END: len(self.content)}
        self.place = max(0, starts[whence] + offset)
        return self.place


def image_column(dataset: Any, name: str) -> Any:
    from datasets import Image as ImageFeature
    from datasets import Value

    require_column("data.image", name, dataset)
    feature = dataset.features[name]
    is_fit = isinstance(feature, ImageFeature) or is_text(feature) or feature == Value("binary")
    require(is_fit, "data.image", name, f"a column of images, or of paths or bytes of some; it is {feature}")
    return dataset.data.column(name)
