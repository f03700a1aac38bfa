"""Points over two and four cards, drawn at random: a mesh, a model and knobs. The draw is a function of the seed."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from scripts.benchmarks import drawn_points as one_card
from scripts.benchmarks.drawn_points import MODELS, TEXTS, sizes_of
from scripts.benchmarks.emulated_points import Point
from scripts.benchmarks.plan_accuracy_points import HUGGING_FACE, TRANSFORMER, shape, spec
from scripts.benchmarks.plan_families_points import KINDS

SEED = 20261130
MOST_CARDS = 4
CARDS = ("rtx3090", "rtx4090", "a100")
FAMILIES = ("gpt2", "llama", "qwen3", "gemma", "opt")
OWN = {
    "gpt2": ["model=gpt2", "train.batch_size=8", "data.sequence_length=512"],
    "deep": shape(12, 512, 32000, 8, 256),
    "vocabulary": shape(4, 512, 128256, 8, 256),
}
OPTIONS = {
    "precision": ("fp32", "bf16", "bf16", "bf16_pure"),
    "ckpt": ("none", "none", "every1", "every2"),
    "optimizer": ("adamw", "adamw", "sgd"),
    "logits": ("full", "full", "chunked"),
    "accum": ("none", "x2", "x4"),
}
DEFAULTS = {**one_card.DEFAULTS, "ckpt": "none", "accum": "none"}


class Mesh(NamedTuple):
    num_cards: int
    words: list[str]


def pipeline(num_cards: int, *words: str) -> Mesh:
    return Mesh(num_cards, ["sharding=pipeline", *words])


MESHES = [
    Mesh(2, ["sharding=ddp"]),
    Mesh(2, ["sharding=zero1"]),
    Mesh(2, ["sharding=fsdp"]),
    Mesh(4, ["sharding=fsdp", "sharding.replicate=2"]),
    Mesh(2, ["sharding=tensor"]),
    Mesh(2, ["sharding=tensor", "sharding.sequence=true"]),
    Mesh(4, ["sharding=fsdp", "sharding.tensor=2"]),
    Mesh(4, ["sharding=zero1", "sharding.tensor=2", "sharding.sequence=true"]),
    Mesh(2, ["sharding=context"]),
    Mesh(4, ["sharding=fsdp", "sharding.context=2"]),
    pipeline(2),
    pipeline(4),
    pipeline(2, "sharding.schedule=gpipe"),
    pipeline(2, "sharding.schedule=interleaved", "sharding.stages=2"),
    pipeline(2, "sharding.schedule=zero_bubble"),
    pipeline(4, "sharding.pipeline=2", "sharding.copies=zero1"),
    pipeline(4, "sharding.pipeline=2", "sharding.copies=fsdp"),
    pipeline(4, "sharding.pipeline=2", "sharding.tensor=2"),
]


def drawn_points(number: int) -> list[Point]:
    """The first points of the draw, without repetitions; each mesh once before any comes again."""
    random, points = Random(SEED), dict[str, Point]()
    meshes: list[Mesh] = []
    while len(points) < number:
        meshes = meshes or random.sample(MESHES, len(MESHES))
        point = drawn(random, meshes[-1])
        if point.name not in points:
            points[point.name] = point
            meshes.pop()
    return list(points.values())


def drawn(random: Random, mesh: Mesh) -> Point:
    kind, card = random.choice([*OWN, *FAMILIES]), random.choice(CARDS)
    changes = {group: random.choice(options) for group, options in OPTIONS.items()}
    batch, length = random.choice(TEXTS)
    if mesh.words[0] == "sharding=pipeline":
        changes["accum"] = "x4"  # of the parts each row has as many
    typed = [f"{group}={name}" for group, name in changes.items() if name != DEFAULTS[group]]
    typed += [*mesh.words, f"sharding.ranks={mesh.num_cards}"]
    if kind in OWN:
        return Point(card, spec(TRANSFORMER, kind, OWN[kind], typed), is_drawn=True)
    words = ["model=hf", f"model.name={MODELS / kind}", f"train.batch_size={batch}", f"data.sequence_length={length}"]
    return Point(card, spec(HUGGING_FACE, f"transformers' {kind} {batch} x {length}", words, typed), is_drawn=True)


def write_models() -> None:
    """Save the configurations that the points read."""
    from lowvram.models.hf_source import transformers

    for kind in FAMILIES:
        config = transformers.AutoConfig.for_model(kind, architectures=[KINDS[kind].architecture], **sizes_of(kind))
        config.save_pretrained(MODELS / kind)
