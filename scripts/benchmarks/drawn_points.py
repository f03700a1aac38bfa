"""Points drawn at random, for a test of plans on what nobody has tuned them on: families of the library transformers,
knobs and cards that aren't among emulated_points.py. The draw is a function of the seed."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from scripts.benchmarks.emulated_points import Point
from scripts.benchmarks.plan_accuracy_points import HUGGING_FACE, spec
from scripts.benchmarks.plan_families_points import KINDS, VISION

SEED = 1
MODELS = Path("outputs/models_drawn")
CARDS = ("a100", "rtx4090", "rtx3070")
OF_TEXT = ("gpt_neo", "gptj", "gemma2", "gemma3_text", "falcon", "mixtral", "t5")
OF_IMAGES = tuple(kind for kind in VISION if kind not in ("vit", "swin", "resnet"))
LARGER = {64: 512, 192: 1536, 512: 16000, 16: 64, 3: 6, 4: 8}  # sizes of text models, by those of small ones
OPTIONS = {
    "precision": ("fp32", "bf16", "bf16", "fp16", "bf16_pure"),
    "ckpt": ("none", "none", "every1", "every2", "selective"),
    "stepping": ("after_backward", "after_backward", "in_backward", "cpu_offload"),
    "optimizer": ("adamw", "adamw", "sgd", "adafactor", "muon"),
    "accum": ("none", "none", "x2", "x4"),
    "offload": ("none", "none", "none", "activations"),
    "logits": ("full", "full", "chunked"),
}
DEFAULTS = {"precision": "fp32", "stepping": "after_backward", "optimizer": "adamw", "logits": "full"}
TEXTS = ((16, 128), (8, 512), (4, 1024))  # samples and tokens


def drawn_points(number: int) -> list[Point]:
    """The first points of the draw, without repetitions."""
    random, points = Random(SEED), dict[str, Point]()
    while len(points) < number:
        point = drawn(random)
        points.setdefault(point.name, point)
    return list(points.values())


def drawn(random: Random) -> Point:
    kind, card = random.choice([*OF_TEXT, *OF_IMAGES]), random.choice(CARDS)
    changes = {group: random.choice(options) for group, options in OPTIONS.items()}
    batch, length = random.choice(TEXTS)
    size = f"data.sequence_length={length}" if kind in OF_TEXT else "data.image_size=224"
    batch = batch if kind in OF_TEXT else 16
    words = ["model=hf", f"model.name={MODELS / kind}", f"train.batch_size={batch}", size]
    typed = [f"{group}={name}" for group, name in changes.items() if name not in ("none", DEFAULTS.get(group))]
    label = f"transformers' {kind} {batch} x {length if kind in OF_TEXT else '224 px'}"
    return Point(card, spec(HUGGING_FACE, label, words, typed), is_drawn=True)


def sizes_of(kind: str) -> dict[str, Any]:
    """Text models in sizes of real use; models of images as the library makes them."""
    sizes = {} if kind in OF_IMAGES else KINDS[kind].sizes
    return {name: LARGER.get(size, size) if type(size) is int else size for name, size in sizes.items()}


def write_models() -> None:
    """Save the configurations that the points read."""
    from lowvram.models.hf_source import transformers

    for kind in (*OF_TEXT, *OF_IMAGES):
        architecture = KINDS[kind].architecture
        config = transformers.AutoConfig.for_model(kind, architectures=[architecture], **sizes_of(kind))
        config.save_pretrained(MODELS / kind)
