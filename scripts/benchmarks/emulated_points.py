"""The points on which plans are held against torch's real allocator on emulated cards, and which of them are held out.

A checksum of its name decides whether a point is held out, so it was fixed before anything was tuned and stays so when
points are added: one of three in the mean, 65 of the first 160. Sizes are those of real use: on an emulated card
kernels compute nothing.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, NamedTuple

from scripts.benchmarks.plan_accuracy_points import CONVOLUTION, HUGGING_FACE, TRANSFORMER, Spec, shape, spec

EXTERNAL = "external"
MODELS = Path("outputs/models_emulated")
HELD_OUT_OF = 3  # one of so many is held out

SHAPES = {
    "gpt2": ["model=gpt2", "train.batch_size=8"],
    "gpt2_medium": ["model=gpt2_medium", "train.batch_size=4"],
    "gpt2_xl": ["model=gpt2_xl", "train.batch_size=4"],
    "small": shape(6, 384, 8192, 16, 256),
    "deep": shape(24, 512, 32000, 8, 512),
    "long": shape(8, 512, 32000, 2, 4096),
    "short": shape(12, 768, 32000, 64, 128),
    "vocabulary": shape(4, 512, 128256, 4, 1024),
}
# By card, shape: what is changed of it.
OWN: dict[str, dict[str, list[str]]] = {
    "rtx3090": {
        "gpt2": [
            "",
            "precision=bf16",
            "precision=fp16",
            "precision=bf16_pure",
            "precision=bf16 ckpt=every1",
            "precision=bf16 ckpt=every2",
            "precision=bf16 ckpt=selective",
            "precision=bf16 accum=x4",
            "precision=bf16 logits=chunked",
            "precision=bf16 optimizer=adafactor",
            "precision=bf16 stepping=in_backward",
            "precision=bf16 stepping=cpu_offload",
            "precision=bf16 offload=activations",
            "precision=bf16 allocator=expandable",
            "precision=bf16 model.dropout=0.1",
            "precision=bf16_pure ckpt=every2 optimizer=adafactor",
            "logits=chunked accum=x32 train.batch_size=64",
        ],
        "gpt2_medium": [
            "precision=bf16 ckpt=every4 logits=chunked",
            "precision=bf16 stepping=in_backward accum=x2",
            "precision=bf16 adapter=lora",
            "precision=bf16_pure stepping=in_backward optimizer=sgd",
        ],
        "small": [
            "",
            "offload=activations",
            "activations=int8",
            "precision=bf16 activations=int4",
            "stepping=cpu_offload",
            "stepping=cpu_offload stepping.offload_fraction=0.5",
            "stepping=in_backward stepping.clip=1.0",
            "offload=parameters",
            "offload=activations_disk precision=bf16",
        ],
        "deep": [
            "precision=bf16 ckpt=every3",
            "precision=fp16 stepping=in_backward",
            "precision=bf16 optimizer=muon",
            "precision=bf16 accum=x8 logits=chunked",
        ],
        "long": [
            "precision=bf16",
            "precision=bf16 ckpt=every1 logits=chunked",
            "precision=bf16 offload=activations ckpt=every2",
        ],
        "short": ["precision=bf16 model.num_kv_heads=4", "precision=tf32 optimizer=sgd stepping.clip=1.0"],
        "vocabulary": ["precision=bf16 logits=chunked", "precision=bf16"],
    },
    "h100": {
        "gpt2": [
            "",
            "precision=bf16",
            "precision=bf16 model.dropout=0.1",
            "precision=fp16",
            "precision=fp8",
            "precision=bf16_pure",
            "precision=bf16 ckpt=every1",
            "precision=bf16 ckpt=selective",
            "precision=bf16 ckpt=every2 allocator=expandable",
            "precision=bf16 logits=chunked",
            "precision=bf16 stepping=in_backward",
            "precision=bf16 stepping=cpu_offload",
            "precision=bf16 offload=activations",
            "precision=bf16 accum=x2 stepping=in_backward",
            "precision=bf16 optimizer=muon",
            "precision=bf16_pure ckpt=every2 optimizer=adafactor",
            "precision=bf16 train.batch_size=64 accum=x32 logits=chunked",
        ],
        "gpt2_medium": [
            "train.batch_size=32",
            "precision=bf16 train.batch_size=16",
            "precision=bf16 adapter=freeze",
            "precision=bf16 adapter=lora ckpt=every1",
            "precision=bf16 adapter=qlora",
            "optimizer=adafactor ckpt=every2",
        ],
        "gpt2_xl": [
            "precision=bf16 ckpt=every1 logits=chunked",
            "precision=bf16_pure ckpt=every2 optimizer=sgd",
            "precision=bf16 stepping=in_backward optimizer=adafactor ckpt=every1",
        ],
        "small": [
            "offload=parameters precision=bf16",
            "stepping=in_backward stepping.norm=two_passes stepping.clip=1.0",
        ],
        "deep": [
            "precision=bf16 optimizer=adamw_8bit",
            "precision=bf16 optimizer=adamw_4bit",
            "precision=bf16 compile=blocks",
            "precision=bf16 model.num_distinct_layers=6",
        ],
        "long": ["precision=bf16", "precision=bf16 ckpt=every2 accum=x2", "precision=bf16 offload=parameters"],
        "short": ["precision=bf16", "precision=bf16 model.num_kv_heads=4 ckpt=every4"],
        "vocabulary": ["precision=bf16 logits=chunked accum=x4", "precision=fp16 model.embedding_width=128"],
    },
    "t4": {
        "gpt2": [
            "train.batch_size=4",
            "precision=fp16 train.batch_size=4",
            "precision=fp16 ckpt=every1 logits=chunked",
            "precision=fp16 stepping=in_backward train.batch_size=4",
            "precision=fp16 optimizer=adafactor accum=x4",
        ],
        "small": ["precision=fp16 model.dropout=0.1", "offload=activations precision=fp16"],
        "long": ["precision=fp16 ckpt=every2", "precision=fp16 allocator=expandable"],
    },
    "rtx3060": {
        "gpt2": [
            "precision=bf16 train.batch_size=4 optimizer=sgd stepping.clip=1.0",
            "precision=bf16 accum=x16 train.batch_size=32 stepping=cpu_offload logits=chunked",
            "precision=bf16_pure optimizer=adafactor stepping=in_backward",
            "precision=fp16 ckpt=every2 offload=activations",
            "ckpt=every1 logits=chunked allocator=expandable",
        ],
        "deep": ["precision=bf16 stepping=in_backward stepping.clip=1.0", "accum=x4 ckpt=selective"],
        "short": ["precision=bf16 adapter=lora adapter.rank=16", "logits=chunked train.batch_size=32"],
    },
}
CONVOLUTIONS: dict[str, list[str]] = {
    "rtx3090": ["model=resnet50 train.batch_size=64", "model=resnet101 train.batch_size=32 accum=x2 precision=bf16"],
    "h100": [
        "model=resnet50 train.batch_size=128 precision=bf16 model.channels_last=true",
        "model=resnet50 train.batch_size=64 ckpt=every2 optimizer=sgd",
    ],
    "t4": ["model=resnet18 train.batch_size=64 precision=fp16"],
    "rtx3060": ["model=resnet50 train.batch_size=32 stepping=in_backward"],
}

DECODER = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
GROUPED = {**DECODER, "num_key_value_heads": 2}
TEXT = {"num_hidden_layers": 6}
# Of the library transformers, by their kinds: the architecture, and what is changed of the library's sizes.
FAMILIES_OF_HF: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {}),
    "llama": ("LlamaForCausalLM", GROUPED),
    "mistral": ("MistralForCausalLM", GROUPED),
    "qwen2": ("Qwen2ForCausalLM", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 64}),
    "gemma": ("GemmaForCausalLM", {**GROUPED, "head_dim": 64}),
    "phi": ("PhiForCausalLM", DECODER),
    "phi3": ("Phi3ForCausalLM", {**GROUPED, "pad_token_id": 0}),
    "olmo2": ("Olmo2ForCausalLM", DECODER),
    "granite": ("GraniteForCausalLM", GROUPED),
    "stablelm": ("StableLmForCausalLM", {**DECODER, "num_key_value_heads": 8}),
    "gpt_neox": ("GPTNeoXForCausalLM", DECODER),
    "opt": (
        "OPTForCausalLM",
        {
            "hidden_size": 512,
            "ffn_dim": 2048,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "word_embed_proj_dim": 512,
        },
    ),
    "bloom": ("BloomForCausalLM", {"hidden_size": 512, "n_layer": 8, "n_head": 8, "vocab_size": 32000}),
    "bert": ("BertForSequenceClassification", TEXT),
    "roberta": ("RobertaForSequenceClassification", {**TEXT, "max_position_embeddings": 514, "type_vocab_size": 1}),
    "distilbert": ("DistilBertForSequenceClassification", {}),
    "electra": ("ElectraForSequenceClassification", TEXT),
    "albert": (
        "AlbertForSequenceClassification",
        {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
    ),
    "bart": ("BartForSequenceClassification", {"d_model": 512, "encoder_layers": 4, "decoder_layers": 4}),
    "vit": ("ViTForImageClassification", TEXT),
    "dinov2": ("Dinov2ForImageClassification", {**TEXT, "image_size": 224}),
    "swin": ("SwinForImageClassification", {}),
    "resnet": ("ResNetForImageClassification", {}),
}
LONG = {"llama", "mistral", "qwen2", "qwen3", "gemma", "phi", "phi3", "olmo2", "granite", "stablelm", "gpt_neox"}
IMAGES = {"vit", "dinov2", "swin", "resnet"}
HF_CHANGES = [  # of one model after another
    "precision=bf16",
    "precision=bf16 ckpt=every1",
    "",
    "precision=bf16 stepping=in_backward",
    "precision=bf16 accum=x2",
    "precision=bf16 optimizer=adafactor",
    "precision=bf16_pure",
]
OTHERS = "scripts.benchmarks.emulated_models"
# Modules in the way of other people's code: what they are called with, and what they read.
READS_TOKENS = ["model.args={vocab_size: data.vocab_size}", "model.reads=TOKENS"]
READS_IMAGES = ["model.args={classes: data.num_classes}", "model.reads=IMAGES", "data.image_size=128"]
EXTERNAL_MODELS = {
    "Encoder": [*READS_TOKENS, "data.sequence_length=512", "data.vocab_size=16000"],
    "Recurrent": [*READS_TOKENS, "data.sequence_length=256", "data.vocab_size=16000"],
    "Mixer": READS_IMAGES,
    "Unet": READS_IMAGES,
    "Waves": [*READS_TOKENS, "data.sequence_length=2048"],
    "Gated": [*READS_TOKENS, "data.sequence_length=512", "data.vocab_size=16000"],
    "Pixels": READS_IMAGES,
}


class Point(NamedTuple):
    """A point on a card."""

    card: str  # of conf/data_sheets
    spec: Spec
    is_drawn: bool = False  # at random, after plans were tuned

    @property
    def name(self) -> str:
        return f"{self.card} {self.spec.name}"

    @property
    def is_held_out(self) -> bool:
        """Whether nothing may be tuned on it."""
        return self.is_drawn or zlib.crc32(self.name.encode()) % HELD_OUT_OF == 0


def emulated_points() -> list[Point]:
    own = [
        Point(card, spec(TRANSFORMER, label, SHAPES[label], changes.split()))
        for card, shapes in OWN.items()
        for label, variants in shapes.items()
        for changes in variants
    ]
    convolutions = [
        Point(card, spec(CONVOLUTION, "", [], words.split())) for card, lines in CONVOLUTIONS.items() for words in lines
    ]
    return [*own, *convolutions, *hugging_face_points(), *external_points()]


def hugging_face_points() -> list[Point]:
    """Two of each family: short on one card, long (where it can be) on another, with other knobs."""
    points = []
    for number, kind in enumerate(FAMILIES_OF_HF):
        cards = ("rtx3090", "h100") if number % 2 else ("h100", "rtx3060")
        for place, card in enumerate(cards):
            words = ["model=hf", f"model.name={MODELS / kind}", *sizes_of(kind, place)]
            changes = HF_CHANGES[(number + 3 * place) % len(HF_CHANGES)].split()
            label = " ".join([f"transformers' {kind}", *sizes_of(kind, place)])
            points.append(Point(card, spec(HUGGING_FACE, label, words, changes)))
    return points


def sizes_of(kind: str, place: int) -> list[str]:
    if kind in IMAGES:
        return ["train.batch_size=32", *(["data.image_size=224"] if kind == "resnet" else [])]
    longest = 4096 if kind in LONG else 1024 if kind in ("gpt2", "opt", "bloom", "bart") else 512
    batch, length = (16, 128) if place == 0 else (max(2, 4096 // longest), longest)
    return [f"train.batch_size={batch}", f"data.sequence_length={length}"]


def external_points() -> list[Point]:
    return [
        Point(card, spec(EXTERNAL, name, words_of(name), changes.split()))
        for name in EXTERNAL_MODELS
        for card, changes in (("rtx3090", ""), ("h100", "precision=bf16"))
    ]


def words_of(name: str) -> list[str]:
    return ["model=external", f"model.target={OTHERS}.{name}", "train.batch_size=16", *EXTERNAL_MODELS[name]]


def write_models() -> None:
    """Save the configurations that the points of transformers read."""
    from lowvram.models.hf_source import transformers

    for kind, (architecture, changes) in FAMILIES_OF_HF.items():
        config = transformers.AutoConfig.for_model(kind, architectures=[architecture], **changes)
        config.save_pretrained(MODELS / kind)
