"""The points that plan_accuracy.py plans and measures: our own models and those of the library transformers, in many
shapes and with many knobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TRANSFORMER, HUGGING_FACE, CONVOLUTION, COMPILED = "transformer", "hugging_face", "convolution", "compiled"
FAMILIES = (TRANSFORMER, HUGGING_FACE, CONVOLUTION, COMPILED)
MODELS = Path("outputs/models")  # where the configurations of others' models lie: a name in points, so not a whole path


class Spec(NamedTuple):
    """A point: the words of the command line."""

    family: str
    name: str
    words: list[str]


def shape(layers: int, width: int, vocabulary: int, batch: int, length: int) -> list[str]:
    """A Transformer with heads of 64 features."""
    sizes = {"num_layers": layers, "width": width, "num_heads": width // 64, "vocab_size": vocabulary}
    words = [f"model.{name}={value}" for name, value in {**sizes, "context": length}.items()]
    return [*words, f"train.batch_size={batch}", f"data.sequence_length={length}"]


# Each takes 0.5 to 3 GB and a few seconds a step on 2 cores: large where arithmetic is cheap.
CPU_SHAPES = {
    "wide": shape(6, 768, 32000, 4, 64),  # parameters and optimizer state
    "deep": shape(20, 320, 4096, 4, 256),  # activations of many blocks
    "long": shape(12, 320, 256, 2, 1024),  # activations of few, long samples
    "logits": shape(2, 192, 50257, 4, 256),  # logits
    "gpt2": ["model=gpt2", "train.batch_size=2", "data.sequence_length=64"],
}
CPU_VARIANTS = {
    "wide": [
        ["optimizer=sgd", "train.batch_size=16"],
        ["optimizer=adafactor", "train.batch_size=16"],
        ["optimizer=muon"],
        ["stepping=in_backward"],
        ["stepping=cpu_offload"],
        ["stepping.clip=1.0"],
        ["offload=parameters"],
        ["offload=activations"],
        ["accum=x4"],
        ["model.positions=learned"],
        ["model.tied_embeddings=false"],
        ["model.vocab_size=8000", "model.width=1024", "model.num_heads=16"],
    ],
    "deep": [
        ["ckpt=every1", "train.batch_size=8"],
        ["ckpt=every2"],
        ["ckpt=every4"],
        ["ckpt=selective"],
        ["accum=x2", "train.batch_size=8"],
        ["offload=activations"],
        ["optimizer=sgd"],
        ["stepping=in_backward"],
        ["model.dropout=0.1"],
        ["model.num_kv_heads=1"],
        ["model.num_distinct_layers=2"],
        ["ckpt=every2", "stepping=in_backward", "logits=chunked"],
    ],
    "long": [
        ["ckpt=every2", "train.batch_size=4"],
        ["accum=x2", "train.batch_size=4"],
        ["data.sequence_length=512", "train.batch_size=4"],
        ["data.sequence_length=256", "train.batch_size=8"],
        ["optimizer=adafactor"],
    ],
    "logits": [
        ["logits=chunked", "train.batch_size=16", "logits.chunk_tokens=1024"],
        ["accum=x2", "train.batch_size=8"],
        ["accum=x4", "train.batch_size=16"],
        ["model.embedding_width=64"],
        ["model.vocab_size=32000", "train.batch_size=8"],
        ["optimizer=muon"],
    ],
    "gpt2": [
        ["optimizer=sgd"],
        ["stepping=in_backward"],
        ["ckpt=every1", "optimizer=adafactor"],
    ],
}
BF16 = {  # only where the CPU is fast at it
    "wide": [["precision=bf16"], ["precision=bf16_pure"]],
    "deep": [["precision=bf16"], ["precision=bf16", "ckpt=every2"], ["precision=bf16_pure"]],
    "logits": [["precision=bf16"]],
}
CPU_CONVOLUTIONS = [
    ["model=resnet18", "data.image_size=64", "train.batch_size=32"],
    ["model=resnet18", "data.image_size=64", "train.batch_size=32", "accum=x2"],
    ["model=resnet50", "data.image_size=64", "train.batch_size=16"],
    ["model=resnet50", "data.image_size=64", "train.batch_size=16", "optimizer=sgd"],
    ["model=resnet50", "data.image_size=96", "train.batch_size=8", "ckpt=every2"],
    ["model=resnet101", "data.image_size=64", "train.batch_size=8"],
]
# Models of the library transformers, by their kinds: sizes that aren't the library's own.
HUGGING_FACE_MODELS = {
    "gpt2": {"architectures": ["GPT2LMHeadModel"]},
    "bert": {"architectures": ["BertForSequenceClassification"]},
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 640,
        "intermediate_size": 1792,
        "num_hidden_layers": 10,
        "num_attention_heads": 10,
        "num_key_value_heads": 2,
    },
}
HUGGING_FACE_VARIANTS = [
    [],
    ["train.batch_size=8", "data.sequence_length=128", "optimizer=sgd"],
    ["train.batch_size=8", "data.sequence_length=128", "ckpt=every1"],
    ["train.batch_size=8", "data.sequence_length=128", "accum=x2", "logits=chunked"],
]
COMPILED_WORDS = [  # their models or their updates are compiled
    ["compile=blocks"],
    ["optimizer=adamw_8bit"],
]

CUDA_SHAPES = {
    "gpt2": ["model=gpt2", "train.batch_size=8"],
    "gpt2_medium": ["model=gpt2_medium", "train.batch_size=4"],
    "deep": shape(24, 512, 32000, 16, 512),
}
CUDA_VARIANTS = [
    [],
    ["precision=bf16"],
    ["precision=fp16"],
    ["precision=bf16_pure"],
    ["precision=bf16", "ckpt=every1"],
    ["precision=bf16", "ckpt=every2"],
    ["precision=bf16", "ckpt=selective"],
    ["precision=bf16", "accum=x4"],
    ["precision=bf16", "logits=chunked"],
    ["precision=bf16", "optimizer=adafactor"],
    ["precision=bf16", "stepping=in_backward"],
    ["precision=bf16", "stepping=cpu_offload"],
    ["precision=bf16", "offload=activations"],
    ["precision=bf16", "allocator=expandable"],
]
CUDA_CONVOLUTIONS = [
    ["model=resnet50", "train.batch_size=64"],
    ["model=resnet50", "train.batch_size=64", "precision=bf16"],
    ["model=resnet50", "train.batch_size=64", "precision=bf16", "model.channels_last=true"],
    ["model=resnet101", "train.batch_size=32", "accum=x2"],
]


def cpu_points(has_bf16: bool) -> list[Spec]:
    """Those of a CPU.

    Args:
        has_bf16: whether it has instructions for bf16.
    """
    specs = []
    for label, words in CPU_SHAPES.items():
        variants = [[], *CPU_VARIANTS[label], *(BF16.get(label, []) if has_bf16 else [])]
        specs += [spec(TRANSFORMER, label, words, changes) for changes in variants]
    specs += hugging_face_points(["train.batch_size=4", "data.sequence_length=64"], HUGGING_FACE_VARIANTS)
    specs += [spec(CONVOLUTION, "", [], words) for words in CPU_CONVOLUTIONS]
    return specs + [spec(COMPILED, "wide", CPU_SHAPES["wide"], words) for words in COMPILED_WORDS]


def cuda_points() -> list[Spec]:
    """Those of a card: each takes some GiB."""
    shapes = CUDA_SHAPES.items()
    specs = [spec(TRANSFORMER, label, words, changes) for label, words in shapes for changes in CUDA_VARIANTS]
    specs += hugging_face_points(["train.batch_size=8", "data.sequence_length=512"], CUDA_VARIANTS[:6])
    specs += [spec(CONVOLUTION, "", [], words) for words in CUDA_CONVOLUTIONS]
    return specs + [spec(COMPILED, label, words, changes) for label, words in shapes for changes in COMPILED_WORDS]


def hugging_face_points(sizes: list[str], variants: list[list[str]]) -> list[Spec]:
    """Of every model, with weights as its author starts them."""
    return [
        spec(HUGGING_FACE, f"transformers' {kind}", ["model=hf", f"model.name={MODELS / kind}", *sizes], changes)
        for kind in HUGGING_FACE_MODELS
        for changes in variants
    ]


def write_models() -> None:
    """Save the configurations that such points read."""
    from lowvram.models.hf_source import transformers

    for kind, changes in HUGGING_FACE_MODELS.items():
        transformers.AutoConfig.for_model(kind, **changes).save_pretrained(MODELS / kind)


def spec(family: str, label: str, words: list[str], changes: list[str]) -> Spec:
    """A point named by its shape and what is changed of it; a word of `changes` takes the place of one before."""
    kept = {word.partition("=")[0]: word for word in [*words, *changes]}
    return Spec(family, " ".join(filter(None, [label, *changes])), list(in_order(kept)))


def in_order(words: dict[str, str]) -> Iterator[str]:
    """Options of groups before their fields."""
    yield from (word for key, word in words.items() if "." not in key)
    yield from (word for key, word in words.items() if "." in key)
