"""Damaged images: found before the first step, whatever the format."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lowvram.config.errors import BadInput
from lowvram.data.hub import Hub
from lowvram.data.image_checks import AT_ONCE, Check, fault_of, faults_of
from lowvram.data.imagefolder import ImageFolder
from lowvram.data.pixels import Undecodable, decoded

KINDS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "TGA", "JPEG2000")


def encoded(kind: str, seed: int = 0, **options: Any) -> bytes:
    file = BytesIO()
    pixels = np.random.default_rng(seed).integers(256, size=(48, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def fault(content: bytes, check: Check = Check.headers) -> str | None:
    return fault_of(lambda: BytesIO(content), 8, check)


def test_whole_images_are_whole() -> None:
    cases = [(kind, {}) for kind in KINDS] + [("TIFF", {"compression": "tiff_lzw"}), ("JPEG", {"progressive": True})]
    for kind, options in cases:
        content = encoded(kind, **options)
        assert all(fault(more, check) is None for more in (content, content + bytes(100)) for check in Check), kind


def test_images_that_were_cut_off_are_found() -> None:
    """Wherever: what the check lets pass can be decoded."""
    draw = np.random.default_rng(20261127)
    for kind in KINDS:
        content = encoded(kind)
        for length in [0, len(content) - 1, len(content) - 700, *draw.integers(1, len(content), 25).tolist()]:
            cut = content[:length]
            if fault(cut) is None:
                decoded(BytesIO(cut), kind, 8)
            else:
                with pytest.raises(Undecodable):
                    decoded(BytesIO(cut), kind, 8)


def test_decode_finds_what_headers_cannot() -> None:
    """Flipped bytes in the middle."""
    draw, num_late = np.random.default_rng(7), 0
    for kind in KINDS:
        for _ in range(25):
            content = bytearray(encoded(kind))
            content[int(draw.integers(len(content)))] ^= int(draw.integers(1, 256))
            early, whole = fault(bytes(content)), fault(bytes(content), Check.decode)
            num_late += early is None and whole is not None
            if whole is None:
                decoded(BytesIO(content), kind, 8)
    assert num_late > 0


def folder_of(root: Path, **files: bytes) -> Path:
    for name in ("cat", "dog"):
        (root / name).mkdir(parents=True)
        for number in range(4):
            (root / name / f"{number}.jpg").write_bytes(encoded("JPEG", number))
    for name, content in files.items():
        (root / "cat" / f"{name}.jpg").write_bytes(content)
    return root


@pytest.mark.usefixtures("datasets_offline")
def test_folders_skip_cut_images_or_name_them(tmp_path: Path) -> None:
    cut = encoded("JPEG")[:-700]
    folder = folder_of(tmp_path / "a", cut=cut)
    with pytest.raises(BadInput, match=r"cat/cut\.jpg can't be read .*truncated.*skip_unreadable=true"):
        ImageFolder(str(folder), image_size=8).open(0)
    data = ImageFolder(str(folder), image_size=8, skip_unreadable=True).open(0)
    assert len(data.train) + len(data.eval) == 8
    bent = bytearray(encoded("PNG"))
    bent[len(bent) // 2] ^= 255
    folder = folder_of(tmp_path / "b", bent=bytes(bent))  # a PNG, named otherwise
    late = ImageFolder(str(folder), image_size=8, skip_unreadable=True).open(0)
    with pytest.raises(Undecodable, match=r"bent\.jpg can't be decoded.*data\.check=decode data\.skip_unreadable=true"):
        [samples.sample(index, 0) for samples in (late.train, late.eval) for index in range(len(samples))]
    early = partial(ImageFolder, str(folder), image_size=8, check=Check.decode)
    with pytest.raises(BadInput, match=r"bent\.jpg can't be read"):
        early().open(0)
    data = early(skip_unreadable=True).open(0)
    assert len([samples.sample(index, 0) for samples in (data.train, data.eval) for index in range(len(samples))]) == 8


@pytest.mark.usefixtures("datasets_offline")
def test_columns_skip_damaged_images_or_name_their_row(tmp_path: Path) -> None:
    from datasets import Dataset

    images = [encoded("JPEG", number) for number in range(8)]
    images[3], images[6] = images[3][:-700], b""
    Dataset.from_dict({"image": images, "kind": ["a", "b"] * 4}).save_to_disk(str(tmp_path / "set"))
    columns = {"image": "image", "label": "kind", "image_size": 8}
    with pytest.raises(BadInput, match=r"data\.image='image': .*the one in row 3 can't be read .*skip_unreadable=true"):
        Hub(str(tmp_path / "set"), **columns).open(0)
    data = Hub(str(tmp_path / "set"), **columns, skip_unreadable=True).open(0)
    assert len([samples.sample(index, 0) for samples in (data.train, data.eval) for index in range(len(samples))]) == 6
    assert "images that can't be read are skipped: 2" in data.description


def test_decompression_bombs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 48 * 64 // 2 - 1)
    assert "decompression bomb" in str(fault(encoded("PNG")))


def test_images_are_handed_to_the_threads_some_at_a_time() -> None:
    image, num_taken, num_read, most = encoded("PNG"), 0, 0, 0

    def images() -> Iterator[int]:
        nonlocal num_taken
        for number in range(4 * AT_ONCE):
            num_taken += 1
            yield number

    def read(_: int) -> BytesIO:
        nonlocal num_read, most
        most = max(most, num_taken - num_read)
        num_read += 1
        return BytesIO(image)

    assert faults_of(images(), read, 8, Check.headers) == [None] * 4 * AT_ONCE
    assert most < 2 * AT_ONCE
