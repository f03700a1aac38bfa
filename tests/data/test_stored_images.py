"""Images in the columns of data sets."""

from __future__ import annotations

import random
import tracemalloc
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from lowvram.data.columns import mapped_value
from lowvram.data.image_checks import Check, faults_of
from lowvram.data.pixels import Undecodable, decoded
from lowvram.data.stored_images import StoredImages
from tests.data.test_image_checks import KINDS, encoded


def stored(column: pa.ChunkedArray) -> StoredImages:
    return StoredImages(column, np.zeros(len(column), np.int64), Path("root"))


def random_value(draw: random.Random, kind: str) -> bytes | str | dict[str, bytes | str | None] | None:
    content = draw.choice([None, b"", draw.randbytes(draw.randint(1, 40))])
    path = draw.choice([None, "", "ä" * draw.randint(1, 9)])
    return (
        draw.choice([None, {"bytes": content, "path": path}])
        if kind == "both"
        else content
        if kind == "bytes"
        else path
    )


def test_each_row_is_read_as_arrow_has_it() -> None:
    """Whatever the type, and however the column is cut into chunks."""
    draw = random.Random(20261127)
    struct = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    types = {"both": [struct], "bytes": [pa.binary(), pa.large_binary()], "paths": [pa.string(), pa.large_string()]}
    for kind in [*types] * 40:
        arrow_type, values = draw.choice(types[kind]), [random_value(draw, kind) for _ in range(20)]
        cuts = sorted(draw.choices(range(21), k=4))
        whole = pa.array(values, arrow_type)
        pieces = [whole[start:stop] for start, stop in zip([0, *cuts], [*cuts, 20], strict=True)]
        images = stored(pa.chunked_array(pieces, arrow_type))
        for row, value in enumerate(values):
            wanted = (value["bytes"] or value["path"]) if isinstance(value, dict) else value
            if not wanted:
                with pytest.raises(Undecodable, match=f"row {row} has no image"):
                    images.file(row)
                continue
            file = images.file(row)
            assert (file if isinstance(file, Path) else file.read()) == (
                wanted if isinstance(wanted, bytes) else Path("root") / wanted
            )


def test_a_value_is_a_part_of_the_mapped_file() -> None:
    array = pa.array([b"abc", b"defg", b"h"])
    value = mapped_value(array[1:2])
    assert value is not None
    assert (value.address, value.size) == (array.buffers()[2].address + 3, 4)


def test_a_check_of_headers_copies_little_of_an_image() -> None:
    image = encoded("JPEG")
    padded = image[:-2] + bytes(20_000_000) + image[-2:]
    images = stored(pa.chunked_array([[padded], [padded[:-1]]]))
    faults = faults_of([0], images.file, 8, Check.headers)  # Pillow's readers are imported
    tracemalloc.start()
    try:
        faults = faults_of([0] * 5, images.file, 8, Check.headers)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert faults == [None] * 5
    assert peak_bytes < 1_000_000


def test_every_format_is_read_as_from_its_own_file() -> None:
    whole = [*map(encoded, KINDS), encoded("TIFF", compression="tiff_lzw"), encoded("JPEG", progressive=True)]
    contents = [content for each in whole for content in (each, each[:-700])]
    images = stored(pa.chunked_array([contents]))
    rows = range(len(contents))
    for check in Check:
        wanted = faults_of(rows, lambda row: BytesIO(contents[row]), 8, check)
        assert faults_of(rows, images.file, 8, check) == wanted
    for row in range(0, len(contents), 2):
        assert images.encoded(row)[0] == contents[row]
        assert pixels(images.load(row, 8)) == pixels(decoded(BytesIO(contents[row]), "", 8))


def pixels(image: Image.Image) -> tuple[str, tuple[int, int], bytes]:
    return image.mode, image.size, image.tobytes()


def test_places_in_a_file_are_those_of_bytes_io() -> None:
    draw, content = random.Random(20261127), bytes(range(256)) * 100
    ours, theirs = stored(pa.chunked_array([[content]])).file(0), BytesIO(content)
    assert not isinstance(ours, Path)
    for _ in range(500):
        offset, whence, count = draw.randint(-30_000, 30_000), draw.randrange(3), draw.choice([-1, 1, 70, 9000])
        if whence or offset >= 0:
            assert ours.seek(offset, whence) == theirs.seek(offset, whence)
        assert ours.read(count) == theirs.read(count)
        assert ours.tell() == theirs.tell()
    with pytest.raises(ValueError, match="negative"):
        ours.seek(-1)
