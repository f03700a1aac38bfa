"""Classes are numbered as the trained head of the model has them."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lowvram.config.errors import BadInput
from lowvram.data.hub import Hub
from lowvram.data.imagefolder import ImageFolder
from lowvram.data.numbering import numbered
from lowvram.data.source import Data, Source, resolve_source
from lowvram.models.hf import HfConfig
from tests.hugging import with_weights

NAMES = ("wolf", "ant", "Bee", "dog", "cat")  # of the head, not in the order of the alphabet
UNNAMED = tuple(f"LABEL_{number}" for number in range(5))


@pytest.mark.parametrize(
    ("classes", "of_head", "names", "numbers"),
    [
        (["ant", "bee"], None, ("ant", "bee"), [0, 1]),
        (["Bee", "ant", "cat", "dog", "wolf"], NAMES, NAMES, [2, 1, 4, 3, 0]),
        (["ANT", "wolf"], NAMES, NAMES, [1, 0]),  # some of them, in other letters
        (["ant", "gnu"], NAMES, ("ant", "gnu"), [0, 1]),
        ([0, 3], NAMES, NAMES, [0, 3]),
        (["1", "4"], NAMES, NAMES, [1, 4]),
        ([False, True], ("no", "yes"), ("no", "yes"), [0, 1]),
        ([1, 5], NAMES, ("1", "5"), [0, 1]),
        ([0, 1], ("3", "7"), ("0", "1"), [0, 1]),  # the head's own names are numbers, and these aren't among them
        ([7, 3], ("3", "7"), ("3", "7"), [1, 0]),
        (["ant", "bee"], UNNAMED, ("ant", "bee"), [0, 1]),
        ([1, 3], UNNAMED, ("LABEL_0", "1", "LABEL_2", "3", "LABEL_4"), [1, 3]),
        (["LABEL_3", "LABEL_1"], UNNAMED, UNNAMED, [3, 1]),
        (["a", "A"], ("A", "a"), ("A", "a"), [1, 0]),
        (["x", "y"], ("x", "x", "y"), ("x", "y"), [0, 1]),  # which x isn't known
    ],
)
def test_numbers(classes: list[Any], of_head: Any, names: Any, numbers: list[int]) -> None:
    found = numbered(classes, of_head)
    assert (found[0], found[1].tolist()) == (names, numbers)


def with_names(kind: str, folder: Path, names: tuple[str, ...] = NAMES) -> HfConfig:
    shutil.copytree(with_weights(kind), folder)
    known = json.loads((folder / "config.json").read_text())
    known |= {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}
    (folder / "config.json").write_text(json.dumps(known))
    return HfConfig(str(folder))


def table(path: Path, classes: list[str]) -> Source:
    """Texts that are the names of their classes."""
    rows = [f"{name},{name}" for name in classes for _ in range(12)]
    random.Random(5).shuffle(rows)
    path.write_text("review,kind\n" + "\n".join(rows))
    return Hub(str(path), text="review", label="kind", tokenizer="bytes", sequence_length=8)


def images(path: Path, classes: list[str]) -> Source:
    for place, name in enumerate(classes):
        (path / name).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (16, 16), (50 * place, 0, 0)).save(path / name / f"{number}.png")
    return ImageFolder(str(path))


def labels_by_text(data: Data) -> dict[str, int]:
    found = {}
    for samples in (data.train, data.eval):
        for index in range(len(samples)):
            inputs, label = samples.sample(index, 0)
            ids = inputs["input_ids"][inputs["attention_mask"] == 1]
            found[bytes(ids.tolist()).decode().strip("\0")] = int(label)
    return found


@pytest.mark.usefixtures("datasets_offline")
@pytest.mark.parametrize("classes", [[*NAMES], ["wolf", "dog"], ["bee", "ANT", "cat"]], ids=["all", "some", "letters"])
def test_texts_have_the_heads_classes(classes: list[str], tmp_path: Path) -> None:
    config = with_names("bert", tmp_path / "m")
    data = resolve_source(table(tmp_path / "rows.csv", classes), config).open(0)
    at = {name.lower(): number for number, name in enumerate(NAMES)}
    assert labels_by_text(data) == {name: at[name.lower()] for name in classes}
    assert (data.spec.class_names, data.spec.num_classes) == (NAMES, 5)
    config.save(config.make(data.spec).to_empty(device="cpu"), data.spec, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["id2label"]["4"] == "cat"


@pytest.mark.usefixtures("datasets_offline")
def test_images_have_the_heads_classes(tmp_path: Path) -> None:
    config = with_names("vit", tmp_path / "m")
    data = resolve_source(images(tmp_path / "images", ["cat", "dog", "wolf"]), config).open(0)
    samples = [data.eval.sample(index, 0) for index in range(3)]
    reds = {int(label): float(pixels[0].max()) for pixels, label in samples}
    assert sorted(reds) == [0, 3, 4]
    assert reds[4] < reds[3] < reds[0]  # a cat is black, a wolf red
    assert (data.spec.class_names, data.spec.num_classes) == (NAMES, 5)


@pytest.mark.usefixtures("datasets_offline")
@pytest.mark.parametrize(("kind", "source"), [("bert", table), ("vit", images)])
def test_other_classes_than_a_trained_heads_are_refused(kind: str, source: Any, tmp_path: Path) -> None:
    config = with_names(kind, tmp_path / "m")
    made = source(tmp_path / "data.csv", ["ant", "gnu"])
    data = resolve_source(made, config).open(0)
    with pytest.raises(BadInput, match=r"classes='ant, gnu': must be among .*: wolf, ant, Bee.*model\.reset_head=true"):
        config.make(data.spec)
    anew = HfConfig(config.name, reset_head=True)
    data = resolve_source(made, anew).open(0)
    assert (data.spec.class_names, anew.config_for(data.spec).num_labels) == (("ant", "gnu"), 2)
