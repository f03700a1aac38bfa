"""No file is lost for its name: whatever it is, the file is used, or a sentence names it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lowvram.config.errors import BadInput
from lowvram.data import imagefolder
from lowvram.data.imagefolder import ImageFolder
from lowvram.data.text import Text
from tests.data.test_csv_files import rows_of

pytestmark = pytest.mark.usefixtures("datasets_offline")

PIECES = [*"ab1 _-.:;,%#?&=+~!@$^*()[]{}'\"|\\<>éü中\n\t", "__", "%3A", "http:", "zip:", ".."]


def odd_name(draw: random.Random) -> str:
    return "".join(draw.choices(PIECES, k=draw.randint(1, 6))).replace("::", ":").lstrip(".") or "x"


def image_folder(draw: random.Random, root: Path, num_classes: int = 12) -> dict[str, int]:
    """Makes classes of images, perhaps with other files. Returns how many images each class has."""
    counts = dict[str, int]()
    for number in range(num_classes):
        folder = root / f"{odd_name(draw)}{number}"
        folder.mkdir(parents=True)
        names = {f"{number}.png" for number in range(draw.randint(2, 4))} | {f"x{odd_name(draw)}.png"}
        for name in names:
            Image.new("RGB", (4, 4)).save(folder / name)
        if draw.random() < 0.4:
            (folder / "notes.txt").write_text("x")
        counts[folder.name] = len(names)
    return counts


def test_images_of_any_name_are_used(tmp_path: Path) -> None:
    draw = random.Random(20261127)
    for number in range(2):
        counts = image_folder(draw, tmp_path / str(number))
        data = ImageFolder(str(tmp_path / str(number)), image_size=4).open(0)
        assert data.spec.class_names == tuple(sorted(counts))
        assert len(data.train) + len(data.eval) == sum(counts.values())


def test_images_with_two_colons_in_their_names_are_named(tmp_path: Path) -> None:
    draw = random.Random(27112026)
    for number in range(8):
        root = tmp_path / str(number)
        image_folder(draw, root, 3)
        moved = draw.choice([*root.iterdir(), *root.glob("*/*.png")])
        moved.rename(moved.parent / f"{odd_name(draw)[:2]}::{moved.name}")
        with pytest.raises(BadInput, match=r"(?s)data\.path=.*: must be without '::' in names of .*: rename .*::"):
            ImageFolder(str(root), image_size=4).open(0)


def test_an_image_that_is_not_listed_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image_folder(random.Random(1), tmp_path, 2)
    load_local = imagefolder.load_local

    def loses_one(*args: Any, **options: Any) -> Any:
        return {split: rows.select(range(len(rows) - 1)) for split, rows in load_local(*args, **options).items()}

    monkeypatch.setattr(imagefolder, "load_local", loses_one)
    with pytest.raises(BadInput, match=r"data\.path=.* whose images `datasets` can list: of the \d of .* it lists \d;"):
        ImageFolder(str(tmp_path), image_size=4).open(0)


def test_tables_and_texts_with_two_colons_are_named(tmp_path: Path) -> None:
    names = ["a::b.csv", "c::d.jsonl", "e::f.txt", "g::h/train.csv", "i/j::k.csv", "l/m::n/o.csv"]
    for name in [*names, "i/train.csv", "l/train.csv"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text,kind\n" + "hello,1\n" * 9)
    for name in names:
        with pytest.raises(BadInput, match=r"data\.name=.*: must be without '::' in names of files .*: rename .*::"):
            rows_of(tmp_path / name.split("/")[0])
        with pytest.raises(BadInput, match=r"data\.path=.*: must be without '::' in names of files .*: rename .*::"):
            Text(str(tmp_path / name), sequence_length=4).open(0)
