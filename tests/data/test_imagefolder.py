from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lowvram.config.errors import BadInput
from lowvram.data.image_rules import CHANNEL_MEAN, CHANNEL_STD
from lowvram.data.imagefolder import (
    ImageFolder,
    RandomCrop,
    center_crop,
    held_out_tenth,
)
from lowvram.data.source import Data, Samples

pytestmark = pytest.mark.usefixtures("datasets_offline")

SIZE = 8
COLOURS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}


def make_class(folder: Path, colour: Sequence[int], num_images: int = 5) -> None:
    """Images of one colour, darker to the left: that tells how they were cropped."""
    folder.mkdir(parents=True)
    for number in range(num_images):
        pixels_wc = np.linspace(0.2, 1, 20 + number)[:, None] * colour
        pixels_hwc = np.repeat(pixels_wc[None], 16, axis=0)
        Image.fromarray(pixels_hwc.astype(np.uint8)).save(folder / f"{number}.png")


def make_folder(root: Path, num_images: int = 5) -> Path:
    for name, colour in COLOURS.items():
        make_class(root / name, colour, num_images)
    return root


def opened(path: Path | str, seed: int = 0, **fields) -> Data:
    return ImageFolder(str(path), image_size=SIZE, **fields).open(seed)


def labels(samples: Samples) -> list[int]:
    return [int(samples.sample(index, 0)[1]) for index in range(len(samples))]


def test_spec_and_labels(tmp_path: Path, image_model) -> None:
    data = ImageFolder(str(make_folder(tmp_path))).resolve(image_model()).open(seed=0)
    assert (data.spec.num_classes, data.spec.shape) == (3, (3, 24, 24))
    assert data.spec.class_names == tuple(sorted(path.name for path in tmp_path.iterdir()))
    assert (len(data.train), len(data.eval)) == (12, 3)
    assert sorted(labels(data.train)) == [0] * 4 + [1] * 4 + [2] * 4
    assert labels(data.eval) == [0, 1, 2]
    brightest = {0: 2, 1: 1, 2: 0}  # classes in the order of their names; channel of their colour
    for index in range(12):
        image, label = data.train.sample(index, 0)
        assert (image.dtype, label.dtype, label.shape) == (torch.float32, torch.int64, ())
        pixels = image.permute(1, 2, 0).numpy() * CHANNEL_STD + CHANNEL_MEAN
        assert pixels.mean((0, 1)).argmax() == brightest[int(label)]
        assert -0.01 <= pixels.min() <= pixels.max() <= 1.01


@pytest.mark.parametrize("name", ["validation", "val", "eval", "test"])
def test_folders_for_training_and_evaluation(tmp_path: Path, name: str) -> None:
    make_folder(tmp_path / "train", 2)
    make_folder(tmp_path / name, 1)
    data = opened(tmp_path)
    assert (labels(data.train), labels(data.eval)) == ([0, 0, 1, 1, 2, 2], [0, 1, 2])


def test_validation_comes_before_test(tmp_path: Path) -> None:
    for name, num_images in (("train", 2), ("test", 3), ("validation", 1)):
        make_folder(tmp_path / name, num_images)
    assert len(opened(tmp_path).eval) == 3


def test_classes_may_be_called_train_and_test(tmp_path: Path) -> None:
    for name in ("train", "test", "plane"):
        make_class(tmp_path / name, (9, 9, 9))
    assert opened(tmp_path).spec.num_classes == 3


def test_training_folder_alone_holds_out_a_tenth(tmp_path: Path) -> None:
    make_folder(tmp_path / "train", 2)
    data = opened(tmp_path)
    assert (len(data.train), len(data.eval)) == (3, 3)


def seen(samples: Samples) -> set[tuple[float, int]]:
    """Colour and class of every image."""
    pairs = [samples.sample(index, 0) for index in range(len(samples))]
    return {(float(image[0, 0, 0]), int(label)) for image, label in pairs}


def test_held_out_images_are_not_trained_on(tmp_path: Path) -> None:
    for colour in (0, 1):
        (tmp_path / str(colour)).mkdir()
        for number in range(20):
            Image.new("RGB", (16, 16), (number * 12, 0, 0)).save(tmp_path / str(colour) / f"{number}.png")
    data = opened(tmp_path)
    train, held_out = seen(data.train), seen(data.eval)
    assert (len(train), len(held_out)) == (36, 4)
    assert not train & held_out


def test_the_held_out_tenth() -> None:
    names = [f"{number}.png" for number in range(60)]
    classes = np.array([0] * 40 + [1] * 19 + [2])
    held_out = held_out_tenth(names, classes)
    assert [int(held_out[classes == label].sum()) for label in range(3)] == [4, 1, 0]
    reversed_too = held_out_tenth(names[::-1], classes[::-1])[::-1]
    assert np.array_equal(held_out, reversed_too)


def test_eval_samples_are_spread_over_the_classes(tmp_path: Path) -> None:
    make_folder(tmp_path / "train", 2)
    make_folder(tmp_path / "test", 4)
    assert labels(opened(tmp_path, eval_samples=3).eval) == [0, 1, 2]


@pytest.mark.parametrize("name", ["a=b", "a,b", "a b", "a[1]*?", "__x__"])
def test_any_name_works(tmp_path: Path, name: str) -> None:
    make_class(tmp_path / name / name, (9, 9, 9))
    make_class(tmp_path / name / "other", (9, 9, 9))
    assert len(opened(tmp_path / name).train) == 8


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path / "images")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(opened("~/images").train) == 12


def test_a_sample_is_pure_in_seed_epoch_and_index(tmp_path: Path) -> None:
    make_folder(tmp_path / "a")
    first, second = (opened(tmp_path / "a").train for _ in range(2))
    other_seed = opened(tmp_path / "a", seed=1).train
    assert torch.equal(first.sample(3, 1)[0], second.sample(3, 1)[0])
    assert not torch.equal(first.sample(3, 1)[0], first.sample(3, 2)[0])
    assert not torch.equal(first.sample(3, 1)[0], other_seed.sample(3, 1)[0])


def test_eval_is_the_middle_in_every_epoch(tmp_path: Path) -> None:
    held_out = opened(make_folder(tmp_path)).eval
    assert torch.equal(held_out.sample(0, 0)[0], held_out.sample(0, 1)[0])
    assert center_crop(20, 16, 0, 0) == ((2, 0, 18, 16), False)


@pytest.mark.parametrize(("width", "height"), [(20, 16), (1, 100), (300, 2)])
def test_random_crops_lie_in_the_image(width: int, height: int) -> None:
    crop = RandomCrop(min_area=0.35, flip=True, seed=0)
    mirrored = 0
    for index in range(200):
        (left, upper, right, lower), flipped = crop(width, height, 0, index)
        assert 0 <= left < right <= width + 1e-6
        assert 0 <= upper < lower <= height + 1e-6
        mirrored += flipped
    assert 60 < mirrored < 140
    assert not any(RandomCrop(0.35, False, 0)(width, height, 0, index)[1] for index in range(50))


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "1", "CMYK"])
def test_any_mode_becomes_rgb(tmp_path: Path, mode: str) -> None:
    make_folder(tmp_path)
    ending = "jpg" if mode == "CMYK" else "png"
    options: dict[str, Any] = {"transparency": bytes([0, 128])} if mode == "P" else {}
    Image.new(mode, (20, 20)).save(tmp_path / "red" / f"x.{ending}", **options)
    data = opened(tmp_path)
    for samples in (data.train, data.eval):
        assert all(samples.sample(index, 0)[0].shape == (3, SIZE, SIZE) for index in range(len(samples)))


def test_a_photo_on_its_side_is_turned(tmp_path: Path) -> None:
    make_folder(tmp_path / "train", 1)
    make_folder(tmp_path / "test", 1)
    photo = Image.new("RGB", (16, 16), (255, 255, 255))
    photo.paste((0, 0, 0), (0, 0, 8, 16))  # the left half is dark
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: turn it clockwise
    (tmp_path / "test" / "blue" / "0.png").unlink()
    photo.save(tmp_path / "test" / "blue" / "0.jpg", exif=exif)
    image, _ = opened(tmp_path).eval.sample(0, 0)
    assert image[:, : SIZE // 2 - 1].max() < image[:, SIZE // 2 + 1 :].min()


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"data\.path='.*nowhere': must be an existing file or folder"):
        opened(tmp_path / "nowhere")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "x.png").touch()
    with pytest.raises(BadInput, match="must be a folder with a folder of images per class"):
        opened(tmp_path / "x.png")


@pytest.mark.parametrize("names", [[], ["only"]])
def test_too_few_classes(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        make_class(tmp_path / name, (1, 2, 3))
    with pytest.raises(BadInput, match="2 or more classes"):
        opened(tmp_path)


def test_an_empty_class_is_named(tmp_path: Path) -> None:
    make_folder(tmp_path)
    (tmp_path / "void").mkdir()
    with pytest.raises(BadInput, match=r"/void holds no image"):
        opened(tmp_path)


def test_one_image_per_class_leaves_none_to_hold_out(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="at least 2 images"):
        opened(make_folder(tmp_path, num_images=1))


def test_a_class_that_only_evaluation_has_is_named(tmp_path: Path) -> None:
    make_folder(tmp_path / "train")
    make_class(tmp_path / "test" / "violet", (9, 0, 9))
    with pytest.raises(BadInput, match="classes that only test/ has: violet"):
        opened(tmp_path)


def test_what_is_no_image_is_named_before_anything_is_decoded(tmp_path: Path) -> None:
    (make_folder(tmp_path) / "red" / "notes.png").write_text("not an image")
    with pytest.raises(BadInput, match=r"made of images: .*red/notes\.png can't be read as one .*skip_unreadable=true"):
        opened(tmp_path)


def test_files_that_are_no_images_are_skipped_and_counted(tmp_path: Path) -> None:
    whole = opened(make_folder(tmp_path))
    (tmp_path / "red" / "labels.json").write_text("{}")
    (tmp_path / "red" / "Thumbs.db").write_bytes(bytes(100))
    data = opened(tmp_path)
    assert f"files that are no images are skipped: 2, such as {tmp_path}/red/Thumbs.db" in data.description
    assert [len(data.train), len(data.eval)] == [len(whole.train), len(whole.eval)]
    assert all(torch.equal(data.train.sample(i, 0)[0], whole.train.sample(i, 0)[0]) for i in range(len(data.train)))


def test_unreadable_images_are_skipped_and_counted_on_request(tmp_path: Path) -> None:
    (make_folder(tmp_path) / "red" / "notes.png").write_text("not an image")
    (tmp_path / "green" / "gone.png").symlink_to(tmp_path / "nothing.png")
    (tmp_path / "green" / "more").mkdir()
    data = opened(tmp_path, skip_unreadable=True)
    assert f"files that are no images are skipped: 3, such as {tmp_path}/green/gone.png" in data.description
    assert len(data.train) == 12


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    (make_folder(tmp_path) / "red" / "void.png").touch()
    with pytest.raises(BadInput, match=r"red/void\.png can't be read as one"):
        opened(tmp_path)


@pytest.mark.parametrize("target", ["loop.png", "gone.png"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, target: str) -> None:
    folder = make_folder(tmp_path) / "red"
    (folder / "loop.png").symlink_to(folder / target)
    with pytest.raises(BadInput, match=r"red/loop\.png can't be read as one"):
        opened(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_named(tmp_path: Path) -> None:
    (make_folder(tmp_path) / "red" / "0.png").chmod(0)
    with pytest.raises(BadInput, match=r"red/0\.png can't be read as one .*Permission denied"):
        opened(tmp_path)


def test_a_folder_inside_a_class_is_named(tmp_path: Path) -> None:
    (make_folder(tmp_path) / "red" / "more").mkdir()
    with pytest.raises(BadInput, match=r"files only: .*red/more is something else"):
        opened(tmp_path)


def test_an_image_with_an_unusual_ending_is_named_not_dropped(tmp_path: Path) -> None:
    folder = make_folder(tmp_path) / "red"
    shutil.copy(folder / "0.png", folder / "0.picture")
    with pytest.raises(BadInput, match=r"rename .*red/0\.picture"):
        opened(tmp_path)


def test_hidden_files_and_files_beside_the_classes_are_ignored(tmp_path: Path) -> None:
    make_folder(tmp_path)
    (tmp_path / "red" / ".DS_Store").touch()
    (tmp_path / ".cache").mkdir()
    (tmp_path / "README.md").touch()
    (tmp_path / "metadata.csv").write_text("file_name\n")
    assert len(opened(tmp_path).train) == 12


def test_an_image_that_breaks_only_when_decoded_is_named(tmp_path: Path) -> None:
    make_folder(tmp_path / "train", 1)
    make_folder(tmp_path / "test", 1)
    broken = tmp_path / "train" / "green" / "0.png"
    noise = np.random.default_rng(0).integers(256, size=(64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(broken)
    content = bytearray(broken.read_bytes())
    content[len(content) // 2] ^= 255
    broken.write_bytes(content)
    train = opened(tmp_path).train
    with pytest.raises(RuntimeError, match=r"train/green/0\.png can't be decoded"):
        train.sample(1, 0)


@pytest.mark.parametrize("name", [b"caf\xe9", b"caf\xe9/1.png"])
def test_a_name_that_is_no_text_is_one_sentence(tmp_path: Path, name: bytes) -> None:
    """`datasets` would end with a traceback."""
    make_folder(tmp_path)
    folder = Path(os.fsdecode(bytes(tmp_path) + b"/" + name))
    if name.endswith(b".png"):
        folder.parent.mkdir()
        shutil.copy(tmp_path / "red" / "0.png", folder)
    else:
        shutil.copytree(tmp_path / "red", folder)
    with pytest.raises(
        BadInput, match=r"^data.path='[^']+': must be a folder in which all names are UTF-8: rename .*caf"
    ):
        opened(tmp_path)


def test_links_out_of_a_class_folder_are_followed_and_told_once(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "all")
    assert "; links" not in opened(folder).description
    (folder / "red" / "0.png").rename(tmp_path / "elsewhere.png")
    (folder / "red" / "0.png").symlink_to(tmp_path / "elsewhere.png")
    (folder / "red" / "inside.png").symlink_to("1.png")
    (folder / "blue" / "other.png").symlink_to("../green/1.png")
    data = opened(folder)
    assert len(data.train) + len(data.eval) == 17
    assert data.description.count("\n") == 0
    links = f"{folder}/blue/other.png to {folder}/green/1.png"
    assert f"; links that lead out of their class folders are followed: 2, such as {links}" in data.description
