"""Models of transformers read pixels as the image processors that come with them write them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lowvram.config.errors import BadInput
from lowvram.core.assemble import assemble
from lowvram.data.hub import Hub
from lowvram.data.image_rules import ImageRules
from lowvram.data.imagefolder import ImageFolder
from lowvram.data.source import Data, Source, resolve_source
from lowvram.data.spec import DataSpec, Modality
from lowvram.models.hf import HfConfig
from lowvram.models.hf_source import transformers
from lowvram.tasks import Auto
from tests.hugging import tiny, with_weights
from tests.laboratory import CPU, knobs_of

pytestmark = pytest.mark.usefixtures("datasets_offline")

HALVES = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.25, 0.5]}
PROCESSORS: dict[str, dict[str, Any]] = {
    "mean and deviation": {"image_processor_type": "ViTImageProcessor", "size": 16, **HALVES},
    "those of its class": {"image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16}},
    "no normalising": {"image_processor_type": "ViTImageProcessor", "size": 16, "do_normalize": False},
    "another factor": {"image_processor_type": "ViTImageProcessor", "size": 16, "rescale_factor": 1 / 127.5, **HALVES},
    "no factor": {"image_processor_type": "ViTImageProcessor", "size": 16, "do_rescale": False, "do_normalize": False},
    "of an old version": {"feature_extractor_type": "ViTFeatureExtractor", "size": 16, "do_normalize": True, **HALVES},
    "blue first": {"image_processor_type": "MobileViTImageProcessor", "size": {"shortest_edge": 18}, "crop_size": 16},
    "an offset": {"image_processor_type": "EfficientNetImageProcessor", "size": 16, "rescale_offset": True},
}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Two classes of images, each of one colour."""
    for name, colour in {"a": (250, 40, 120), "b": (10, 200, 60)}.items():
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (20, 16), colour).save(tmp_path / "images" / name / f"{number}.png")
    return tmp_path / "images"


def with_processor(folder: Path, about: Any, kind: str = "vit", file: str = "preprocessor_config.json") -> Path:
    shutil.copytree(with_weights(kind), folder)
    (folder / file).write_text(about if isinstance(about, str) else json.dumps(about))
    return folder


def opened(source: Source, where: Path) -> Data:
    return resolve_source(source, HfConfig(str(where))).open(0)


def theirs(where: Path, image: Path) -> Any:
    """What the model's own processor makes of the middle of an image."""
    processor = transformers.AutoImageProcessor.from_pretrained(where, trust_remote_code=False)
    pixels = processor([Image.open(image)], return_tensors="pt")["pixel_values"][0]
    return pixels[:, pixels.shape[1] // 2, pixels.shape[2] // 2].float()


def check_pixels(data: Data, where: Path, images: Path) -> None:
    for samples in (data.train, data.eval):
        for index in range(len(samples)):
            pixels, label = samples.sample(index, 0)
            torch.testing.assert_close(pixels[:, 8, 8], theirs(where, images / "ab"[int(label)] / "0.png"))


@pytest.mark.parametrize("kind", PROCESSORS)
def test_pixels_are_those_of_the_models_own_processor(kind: str, images: Path, tmp_path: Path) -> None:
    where = with_processor(tmp_path / "m", PROCESSORS[kind])
    check_pixels(opened(ImageFolder(str(images)), where), where, images)


def test_images_of_a_column_become_the_same(images: Path, tmp_path: Path) -> None:
    where = with_processor(tmp_path / "m", PROCESSORS["mean and deviation"])
    rows = [f"{path.relative_to(images.parent)},{path.parent.name}" for path in sorted(images.rglob("*.png"))]
    (tmp_path / "rows.csv").write_text("file,kind\n" + "\n".join(rows))
    hub = Hub(str(tmp_path / "rows.csv"), image="file", label="kind")
    check_pixels(opened(hub, where), where, images)


def test_settings_beside_those_of_other_processors_count(images: Path, tmp_path: Path) -> None:
    about = {"image_processor": PROCESSORS["mean and deviation"]}
    where = with_processor(tmp_path / "m", about, file="processor_config.json")
    check_pixels(opened(ImageFolder(str(images)), where), where, images)


def test_without_settings_pixels_are_scaled_as_imagenets(images: Path) -> None:
    assert HfConfig(tiny("vit")).image_rules == ImageRules()
    pixels, _ = opened(ImageFolder(str(images)), Path(tiny("vit"))).eval.sample(0, 0)
    wanted = (np.array([250, 40, 120]) / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    assert np.allclose(pixels[:, 8, 8].numpy(), wanted, atol=1e-6)


@pytest.mark.parametrize(
    "about",
    [
        "{",
        {"image_processor_type": "ImageGPTImageProcessor"},
        {"image_processor_type": "Mine"},
        {"image_processor_type": "Mine", "auto_map": {"AutoImageProcessor": "mine.Mine"}},
    ],
    ids=["damaged", "colours of a palette", "unknown", "its own code"],
)
def test_a_processor_that_does_anything_else_is_refused(about: Any, images: Path, tmp_path: Path) -> None:
    where = with_processor(tmp_path / "m", about)
    (where / "mine.py").write_text(f"open({str(tmp_path / 'trap')!r}, 'w')\nclass Mine: pass")
    with pytest.raises(BadInput, match=r"^model\.name=.*: must be a model whose preprocessor_config\.json says"):
        opened(ImageFolder(str(images)), where)
    assert not (tmp_path / "trap").exists()


def test_the_size_is_the_processors_where_the_model_takes_any(tmp_path: Path) -> None:
    about = {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 40}}
    assert HfConfig(str(with_processor(tmp_path / "m", about, "resnet"))).natural_shape() == (3, 40, 40)
    assert HfConfig(str(with_processor(tmp_path / "vit", PROCESSORS["mean and deviation"]))).natural_shape()[1] == 16


@pytest.mark.parametrize("size", [{"shortest_edge": 48}, 48, {"height": 48, "width": 48}], ids=str)
def test_the_saved_processor_makes_images_of_the_size_that_was_trained_with(size: Any, tmp_path: Path) -> None:
    about = {"image_processor_type": "CLIPImageProcessor", "size": size, "crop_size": 32, **HALVES}
    config = HfConfig(str(with_processor(tmp_path / "m", about, "resnet")))
    spec = DataSpec(Modality.IMAGES, 2, (3, 24, 24))
    config.save(assemble(Auto().pose(config, spec), knobs_of(), CPU).model, spec, tmp_path / "saved")
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "saved", trust_remote_code=False)
    pixels = processor([Image.new("RGB", (50, 60))], return_tensors="pt")["pixel_values"]
    assert pixels.shape[-2:] == (24, 24)
    assert HfConfig(str(tmp_path / "saved")).image_rules == config.image_rules
