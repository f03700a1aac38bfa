"""The models of bench_search.py: two of our own, and six of other people on which no search was tuned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FOLDER = Path("outputs/models_search")
OWN = {
    "transformer": ["model=transformer", "model.num_layers=12", "model.vocab_size=4096", "train.batch_size=16"],
    "resnet": ["model=resnet", "model.norm=group", "data.image_size=96", "data.num_classes=10", "train.batch_size=32"],
}
WIDTHS = {"hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 352}
# Of the library transformers, by their kinds: the architecture, and sizes that aren't the library's own.
OF_TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**WIDTHS, "num_key_value_heads": 2, "vocab_size": 2048}),
    "bert": ("BertForSequenceClassification", {**WIDTHS, "vocab_size": 2048}),
    "vit": ("ViTForImageClassification", {**WIDTHS, "image_size": 64, "patch_size": 8}),
    "convnext": ("ConvNextForImageClassification", {"depths": [2, 2, 4, 2], "hidden_sizes": [24, 48, 96, 192]}),
}
TEXTS = ["data.sequence_length=128", "train.batch_size=16"]
IMAGES = ["data.image_size=64", "data.num_classes=10", "train.batch_size=32"]


def of_transformers(kind: str, *words: str) -> list[str]:
    return ["model=hf", f"model.name={FOLDER / kind}", *words]


def external(name: str, *words: str) -> list[str]:
    target = f"model.target=scripts.benchmarks.strangers.{name}"
    return ["model=external", target, "model.args={num_classes: data.num_classes}", "model.reads=IMAGES", *words]


HELD_OUT = {
    "llama": of_transformers("llama", *TEXTS),
    "bert": of_transformers("bert", *TEXTS),
    "vit": of_transformers("vit", *IMAGES),
    "convnext": of_transformers("convnext", *IMAGES),
    "patches": external("PatchTransformer", *IMAGES),
    "hourglass": external("Hourglass", *IMAGES, "train.batch_size=8"),
}
MODELS = {**OWN, **HELD_OUT}


def write_models() -> None:
    """Save the configurations that the points of transformers read."""
    from lowvram.models.hf_source import transformers

    for kind, (architecture, sizes) in OF_TRANSFORMERS.items():
        config = transformers.AutoConfig.for_model(kind, architectures=[architecture], **sizes)
        config.save_pretrained(FOLDER / kind)
