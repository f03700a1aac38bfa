"""The points of plan_families.py: small models of many families of the library transformers, as its own configurations
make them, at several lengths or sizes of their samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from scripts.benchmarks.plan_accuracy_points import MODELS, Spec

SEEN, HELD_OUT = "seen", "held out"
GROUPS = (SEEN, HELD_OUT)
BATCH = 4  # samples
LENGTHS = (64, 256, 1024)  # tokens
IMAGE_SIZES = (128, 192, 256)  # pixels a side
WORDS = {"vocab_size": 512, "max_position_embeddings": 1024}
WIDTHS = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
ENCODER = {**WORDS, **WIDTHS, "intermediate_size": 192}
DECODER = {**ENCODER, "num_key_value_heads": 2, "head_dim": 16}
IMAGE = {**WIDTHS, "intermediate_size": 192}
STAGES = {"depths": [2, 2, 2, 2], "hidden_sizes": [16, 32, 64, 128]}
WINDOWS = {"embed_dim": 16, "depths": [2, 2, 2, 2], "num_heads": [1, 2, 4, 8]}


class ModelFamily(NamedTuple):
    """A class of the library, and sizes that aren't the library's own."""

    architecture: str
    sizes: dict[str, Any]


DECODERS = {
    "gpt2": ModelFamily("GPT2LMHeadModel", {"vocab_size": 512, "n_embd": 64, "n_layer": 3, "n_head": 4}),
    "opt": ModelFamily("OPTForCausalLM", {**ENCODER, "ffn_dim": 192, "word_embed_proj_dim": 64}),
    "gpt_neo": ModelFamily(
        "GPTNeoForCausalLM",
        {**WORDS, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    ),
    "gpt_neox": ModelFamily("GPTNeoXForCausalLM", ENCODER),
    "gptj": ModelFamily(
        "GPTJForCausalLM",
        {"vocab_size": 512, "n_positions": 1024, "n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8},
    ),
    "llama": ModelFamily("LlamaForCausalLM", DECODER),
    "mistral": ModelFamily("MistralForCausalLM", {**DECODER, "sliding_window": 128}),
    "qwen2": ModelFamily("Qwen2ForCausalLM", DECODER),
    "qwen3": ModelFamily("Qwen3ForCausalLM", DECODER),
    "gemma": ModelFamily("GemmaForCausalLM", DECODER),
    "gemma2": ModelFamily("Gemma2ForCausalLM", {**DECODER, "sliding_window": 128}),
    "gemma3_text": ModelFamily("Gemma3ForCausalLM", {**DECODER, "sliding_window": 128}),
    "phi": ModelFamily("PhiForCausalLM", ENCODER),
    "falcon": ModelFamily("FalconForCausalLM", ENCODER),
    "stablelm": ModelFamily("StableLmForCausalLM", {**ENCODER, "num_key_value_heads": 2}),
    "bloom": ModelFamily("BloomForCausalLM", {"vocab_size": 512, "hidden_size": 64, "n_layer": 3, "n_head": 4}),
    "mixtral": ModelFamily("MixtralForCausalLM", {**DECODER, "num_local_experts": 4}),
}
ENCODERS = {
    "bert": ModelFamily("BertForSequenceClassification", ENCODER),
    "roberta": ModelFamily("RobertaForSequenceClassification", {**ENCODER, "max_position_embeddings": 1026}),
    "distilbert": ModelFamily(
        "DistilBertForSequenceClassification", {**WORDS, "dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 192}
    ),
    "electra": ModelFamily("ElectraForSequenceClassification", {**ENCODER, "embedding_size": 32}),
    "t5": ModelFamily(
        "T5ForSequenceClassification",
        {"vocab_size": 512, "d_model": 64, "d_kv": 16, "d_ff": 192, "num_layers": 2, "num_heads": 4}
        | {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1},
    ),
}
VISION = {
    "vit": ModelFamily("ViTForImageClassification", {**IMAGE, "patch_size": 8}),
    "deit": ModelFamily("DeiTForImageClassification", {**IMAGE, "patch_size": 8}),
    "data2vec-vision": ModelFamily("Data2VecVisionForImageClassification", {**IMAGE, "patch_size": 8}),
    "convnext": ModelFamily("ConvNextForImageClassification", STAGES),
    "convnextv2": ModelFamily("ConvNextV2ForImageClassification", STAGES),
    "swin": ModelFamily("SwinForImageClassification", {**WINDOWS, "window_size": 4}),
    "swinv2": ModelFamily("Swinv2ForImageClassification", {**WINDOWS, "window_size": 4}),
    "resnet": ModelFamily("ResNetForImageClassification", {**STAGES, "embedding_size": 16}),
    "bit": ModelFamily("BitForImageClassification", {**STAGES, "embedding_size": 16, "num_groups": 4}),
    "cvt": ModelFamily("CvtForImageClassification", {"embed_dim": [16, 32, 64], "num_heads": [1, 2, 4]}),
    "levit": ModelFamily(
        "LevitForImageClassification",
        {"hidden_sizes": [32, 48, 64], "num_attention_heads": [2, 3, 4], "depths": [2, 2, 2], "key_dim": [8, 8, 8]},
    ),
    "focalnet": ModelFamily("FocalNetForImageClassification", {"embed_dim": 16, "depths": [2, 2, 2, 2]}),
    "poolformer": ModelFamily("PoolFormerForImageClassification", STAGES),
    "pvt": ModelFamily(
        "PvtForImageClassification",
        {"depths": [2, 2, 2, 2], "hidden_sizes": [16, 32, 64, 128], "num_attention_heads": [1, 2, 4, 8]},
    ),
}
# Named before any plan of a family was compared; nothing was tuned on these.
HELD_OUT_KINDS = (
    *("gpt_neo", "gptj", "qwen3", "gemma2", "stablelm", "bloom", "distilbert", "electra"),
    *("swin", "focalnet", "pvt", "convnextv2"),
)


KINDS = {**DECODERS, **ENCODERS, **VISION}


def family_points() -> list[Spec]:
    """Every family at every size; texts with a class without padding and with it."""
    specs = [point(kind, f"{length}", f"data.sequence_length={length}") for kind in DECODERS for length in LENGTHS]
    for kind in ENCODERS:
        for length in LENGTHS:
            specs.append(point(kind, f"{length}", f"data.sequence_length={length}"))
            specs.append(point(kind, f"{length} padded", f"data.sequence_length={length}", data="python_packages"))
    return specs + [point(kind, f"{size} px", f"data.image_size={size}") for kind in VISION for size in IMAGE_SIZES]


def point(kind: str, label: str, size: str, data: str = "synthetic") -> Spec:
    words = ["model=hf", f"data={data}", f"model.name={MODELS / kind}", f"train.batch_size={BATCH}", size]
    return Spec(HELD_OUT if kind in HELD_OUT_KINDS else SEEN, f"{kind} {label}", words)


def write_family(kind: str, folder: Path) -> None:
    """Save the configuration of a family."""
    from lowvram.models.hf_source import transformers

    architecture, sizes = KINDS[kind]
    transformers.AutoConfig.for_model(kind, architectures=[architecture], **sizes).save_pretrained(folder)
