"""Tiny models of transformers, as folders that the library's own save functions make."""

from __future__ import annotations

import atexit
import tempfile
from functools import cache
from typing import Any

from lowvram.models.hf_source import transformers

ROOT = tempfile.TemporaryDirectory(prefix="lowvram-hugging-")
atexit.register(ROOT.cleanup)
HEADS = {"num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
WORDS = {"vocab_size": 300, "max_position_embeddings": 64}
GPT2 = {"vocab_size": 300, "n_positions": 64, "n_embd": 16, "n_layer": 3, "n_head": 2}
T5 = {"vocab_size": 300, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {  # by their kinds: a class of the library, and sizes
    "gpt2": ("GPT2LMHeadModel", {**GPT2, "bos_token_id": 0, "eos_token_id": 0}),
    "llama": ("LlamaForCausalLM", {**WORDS, **HEADS, "num_key_value_heads": 1}),
    "bert": ("BertForSequenceClassification", {**WORDS, **HEADS}),
    "t5": ("T5ForSequenceClassification", {**T5, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}),
    "vit": ("ViTForImageClassification", {**HEADS, "image_size": 16, "patch_size": 4}),
    "resnet": ("ResNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2]}),
}


@cache
def tiny(kind: str) -> str:
    """The path of a folder that holds the configuration alone."""
    architecture, sizes = CONFIGS[kind]
    config = transformers.AutoConfig.for_model(kind, architectures=[architecture], **sizes)
    config.save_pretrained(f"{ROOT.name}/{kind}")
    return f"{ROOT.name}/{kind}"
