"""loader.cache: the same batches, fewer images decoded, and files that can't go wrong."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lowvram.config.errors import BadInput
from lowvram.core.rig import Part
from lowvram.data import image_cache
from lowvram.data.batch_sizes import SameSize
from lowvram.data.hub import Hub
from lowvram.data.image_cache import Counts, ImageCache, Memory, read_entry
from lowvram.data.imagefolder import ImageFolder
from lowvram.data.loader import CacheKind, Inline, Stacked, Workers
from lowvram.data.source import Data
from lowvram.data.synthetic import Synthetic
from tests.calls import Outcome

# torch's advice on a machine of one core; two workers are right there too.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

Call = Callable[..., Outcome]
CPU = torch.device("cpu")
SIZE, NUM_IMAGES, BATCH = 8, 6, 4  # images of each of two classes, of which one is held out
NO_MODEL: Any = None  # no loader asks it about images


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """JPEGs and PNGs of different sizes, whose names `datasets` keeps in a folder of the test."""
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    draw = np.random.default_rng(0)
    for name, ending in (("cat", "jpg"), ("dog", "png")):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(NUM_IMAGES):
            pixels = draw.integers(256, size=(20 + number, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{number}.{ending}")
    return tmp_path / "images"


def opened(images: Path, loader: Stacked, size: int = SIZE) -> Data:
    return loader.fit(ImageFolder(str(images), image_size=size).open(seed=0), NO_MODEL)


def on_disk(folder: Path, kind: type[Stacked] = Inline) -> Stacked:
    return kind(cache=CacheKind.disk, cache_folder=str(folder))


def first_batches(loader: Stacked, data: Data, number: int, first_step: int = 0) -> list[Part]:
    batches = loader.batches(data.train, SameSize(BATCH), 0, first_step, CPU)
    parts = list(itertools.islice(batches, number))
    batches.close()
    return parts


def counts(data: Data) -> Counts:
    assert isinstance(data.cache, ImageCache)
    return data.cache.counts()


def same(left: list[Part], right: list[Part]) -> bool:
    ours, theirs = ([tensor for part in parts for tensor in part.tensors()] for parts in (left, right))
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind", [Inline, Workers])
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_batches_are_the_same_and_each_image_is_decoded_once(
    images: Path, tmp_path: Path, kind: type[Stacked], where: str
) -> None:
    """Over five epochs; another run begins in the middle. The held-out images come through the same cache."""
    expected = first_batches(Inline(), opened(images, Inline()), 13)
    loader = on_disk(tmp_path / "cache", kind) if where == "disk" else kind(cache=CacheKind.memory)
    data = opened(images, loader)
    assert same(first_batches(loader, data, 13), expected)
    found = counts(data)
    assert found.num_misses >= 10  # workers may read some ahead, or the same one at once
    assert found.num_hits >= 2 * found.num_misses
    assert found.held_bytes >= 10 * 20 * 40 * 3
    again = opened(images, loader)
    assert same(first_batches(loader, again, 5, first_step=8), expected[8:])
    assert (counts(again).num_misses == 0) is (where == "disk")
    plain = opened(images, Inline()).eval
    for _ in range(2):
        pairs = zip(map(again.eval.sample, range(2), (0, 0)), map(plain.sample, range(2), (0, 0)), strict=True)
        assert all(torch.equal(ours[0], theirs[0]) for ours, theirs in pairs)


def read_all(data: Data) -> torch.Tensor:
    return torch.stack([data.train.sample(index, 0)[0] for index in range(len(data.train))])


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_the_limit_holds(images: Path, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images that find no room are decoded each time; those of earlier runs count on disk, and of other files none."""
    monkeypatch.setenv("LOWVRAM_CACHE", str(tmp_path / "cache"))
    whole, loader = read_all(opened(images, Inline())), Inline(cache=CacheKind[where], cache_limit="10KB")
    data = opened(images, loader)
    for _ in range(2):
        assert torch.equal(read_all(data), whole)
    found = counts(data)
    assert 5_000 < found.held_bytes <= 10_000
    assert 0 < found.num_hits < 10
    if where == "disk":
        again = opened(images, loader)
        read_all(again)
        assert counts(again).held_bytes == found.held_bytes
        (tmp_path / "cache" / "images" / "mine.pixels").write_bytes(bytes(10_000))
        assert counts(opened(images, loader)).held_bytes == found.held_bytes


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.pixels"))


def damage(entry: Path, how: str) -> None:
    whole = bytearray(entry.read_bytes())
    if how == "flipped":
        whole[len(whole) // 2] ^= 1
    changed = {"cut": whole[:-1], "long": whole + b"\0", "flipped": whole, "empty": b"", "foreign": b"mine" * 500}
    entry.write_bytes(changed[how])


@pytest.mark.parametrize("how", ["cut", "long", "flipped", "empty", "foreign"])
def test_a_damaged_file_is_made_anew(images: Path, tmp_path: Path, how: str) -> None:
    loader = on_disk(tmp_path / "cache")
    whole = read_all(opened(images, loader))
    kept = {entry: entry.read_bytes() for entry in entries(tmp_path / "cache")}
    assert len(kept) == 10
    damage(entries(tmp_path / "cache")[3], how)
    assert read_entry(entries(tmp_path / "cache")[3]) is None
    data = opened(images, loader)
    assert torch.equal(read_all(data), whole)
    assert counts(data)[1:] == (9, 1)
    assert {entry: entry.read_bytes() for entry in entries(tmp_path / "cache")} == kept


def test_other_files_stay_and_nothing_is_left_over(images: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    (folder / "ab").mkdir(parents=True)
    others = [folder / "notes.txt", folder / "ab" / "mine", folder / f"{'ab' * 16}.pixels"]
    for file in others:
        file.write_text("mine")
    read_all(opened(images, on_disk(folder)))
    assert [file.read_text() for file in others] == ["mine"] * 3
    assert {path for path in folder.rglob("*") if path.is_file()} == {*others, *entries(folder)}


def test_an_image_is_told_by_its_contents(images: Path, tmp_path: Path) -> None:
    """Another file under the same name, of the same size and time, is another image."""
    loader, file = on_disk(tmp_path / "cache"), images / "dog" / "0.png"
    read_all(opened(images, loader))
    other = bytearray(file.read_bytes())
    Image.open(file).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(file)
    about = file.stat()
    changed = file.read_bytes().ljust(len(other), b"\0")  # Pillow reads nothing behind the end of an image
    file.write_bytes(changed)
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert torch.equal(read_all(opened(images, loader)), read_all(opened(images, Inline())))


def test_pixels_of_another_size_are_other_ones(images: Path, tmp_path: Path) -> None:
    """Of a large JPEG a fraction is decoded, which depends on data.image_size."""
    large = np.random.default_rng(1).integers(256, size=(400, 400, 3), dtype=np.uint8)
    Image.fromarray(large).save(images / "cat" / "0.jpg")
    loader = on_disk(tmp_path / "cache")
    for size in (8, 64):
        assert torch.equal(read_all(opened(images, loader, size)), read_all(opened(images, Inline(), size)))


def read_in_a_process(images: Path, folder: Path, name: str) -> None:
    np.save(folder / name, read_all(opened(images, on_disk(folder / "cache"))).numpy())


def test_processes_share_a_folder(images: Path, tmp_path: Path) -> None:
    """Several runs begin at once, with an empty folder."""
    context = multiprocessing.get_context("fork")
    runs = [context.Process(target=read_in_a_process, args=(images, tmp_path, f"{run}.npy")) for run in range(4)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    expected = read_all(opened(images, Inline())).numpy()
    assert all(np.array_equal(np.load(tmp_path / f"{run}.npy"), expected) for run in range(4))
    assert len(entries(tmp_path / "cache")) == 10
    assert all(read_entry(entry) is not None for entry in entries(tmp_path / "cache"))
    assert not list((tmp_path / "cache").rglob("*.unfinished"))


def test_a_folder_that_disappears_or_is_full_costs_only_time(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no space left on device")

    data = opened(images, on_disk(tmp_path / "cache"))
    (tmp_path / "cache").rmdir()
    expected = read_all(opened(images, Inline()))
    assert torch.equal(read_all(data), expected)
    assert counts(data).held_bytes == 0
    monkeypatch.setattr(image_cache, "write", refuse)
    assert torch.equal(read_all(opened(images, on_disk(tmp_path / "cache"))), expected)


def test_a_process_that_died_while_it_counted_stops_no_other(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_cache, "LOCK_S", 0.001)
    data = opened(images, Inline(cache=CacheKind.memory))
    assert isinstance(data.cache, Memory)
    data.cache.tally.lock.acquire()
    assert torch.equal(read_all(data), read_all(opened(images, Inline())))


@pytest.mark.parametrize("as_bytes", [True, False])
def test_images_of_a_table(images: Path, tmp_path: Path, as_bytes: bool) -> None:
    import datasets

    files = sorted(images.glob("*/*"))
    values = [file.read_bytes() if as_bytes else str(file) for file in files]
    table = datasets.Dataset.from_dict({"file": values, "kind": [file.parent.name for file in files]})
    table.to_parquet(tmp_path / "table.parquet")
    source = Hub(str(tmp_path / "table.parquet"), image="file", label="kind", image_size=SIZE)
    plain = read_all(source.open(seed=0))
    for loader in (on_disk(tmp_path / "cache"), Inline(cache=CacheKind.memory)):
        data = loader.fit(source.open(seed=0), NO_MODEL)
        assert torch.equal(read_all(data), plain)
        assert torch.equal(read_all(data), plain)
        assert counts(data)[1:] == (10, 10)


def test_a_broken_image_is_named(images: Path, tmp_path: Path) -> None:
    data = opened(images, on_disk(tmp_path / "cache"))
    (images / "dog" / "1.png").write_bytes((images / "dog" / "1.png").read_bytes()[:60])
    with pytest.raises(RuntimeError, match=r"dog/1\.png can't be decoded"):
        read_all(data)
    (images / "dog" / "1.png").unlink()
    with pytest.raises(RuntimeError, match=r"dog/1\.png can't be read"):
        read_all(data)


def test_other_data_are_refused(image_model) -> None:
    data = Synthetic().resolve(image_model()).open(seed=0)
    with pytest.raises(BadInput, match=r"loader\.cache='memory': must be none for these data: only images"):
        Inline(cache=CacheKind.memory).fit(data, NO_MODEL)


def test_a_folder_that_cant_be_used_is_named(images: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"loader\.cache_folder='.*file': must be null or a folder that can be written"):
        opened(images, on_disk(tmp_path / "file"))


@pytest.mark.parametrize("kind", [Inline, Workers])
def test_values_out_of_range_are_named(kind: type[Stacked]) -> None:
    with pytest.raises(BadInput, match=r"loader\.cache_limit='4': must be null or a number above 0 with a unit"):
        kind(cache_limit="4")
    with pytest.raises(BadInput, match=r"loader\.cache_folder='x': must be null unless loader\.cache=disk"):
        kind(cache=CacheKind.memory, cache_folder="x")


@pytest.mark.slow
def test_a_row_says_what_the_cache_holds(call: Call, images: Path) -> None:
    words = ("model=resnet", "model.layers=[1]", "model.width=4", "data=imagefolder", f"data.path={images}")
    more = ("train.steps=6", f"train.batch_size={BATCH}", "logger=none", "device=cpu", "loader.cache=memory")
    found = call(*words, *more)
    assert found.code == 0, found.said()
    assert found.row["data"]["cache_bytes"] > 10 * 20 * 40 * 3
    assert 0.5 < found.row["data"]["cache_hit_frac"] < 0.8
    assert "cache hit frac" in found.said()
