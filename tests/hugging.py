"""Tiny models of transformers, as folders that the library's own save functions make."""

from __future__ import annotations

import atexit
import tempfile
from functools import cache
from typing import Any

import torch

from lowvram.models.hf_source import transformers

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
OPT = {"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "word_embed_proj_dim": 16}
DISTILBERT = {"dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 2}
SWIN = {"patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}
SPECIAL = {"decoder_start_token_id": 0, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}
LAYERS = {"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
BART = {
    **WORDS,
    "d_model": 16,
    **LAYERS,
    **{name.replace("encoder", "decoder"): value for name, value in LAYERS.items()},
    "forced_eos_token_id": 1,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # more, which only some tests try; after a colon: another head
    **CONFIGS,
    "bert:masked": ("BertForMaskedLM", {**WORDS, **HEADS}),
    "roberta:masked": ("RobertaForMaskedLM", {**WORDS, **HEADS}),
    "distilbert:masked": ("DistilBertForMaskedLM", {**WORDS, **DISTILBERT}),
    "t5:pairs": ("T5ForConditionalGeneration", {**T5, **SPECIAL}),
    "bart": ("BartForConditionalGeneration", {**BART, **SPECIAL}),
    "mbart": ("MBartForConditionalGeneration", {**BART, **SPECIAL}),
    "marian": ("MarianMTModel", {**BART, **SPECIAL}),
    "opt": ("OPTForCausalLM", {**WORDS, **OPT}),
    "gpt_neox": ("GPTNeoXForCausalLM", {**WORDS, **HEADS}),
    "qwen3": ("Qwen3ForCausalLM", {**WORDS, **HEADS, "num_key_value_heads": 1, "head_dim": 8}),
    "mistral": ("MistralForCausalLM", {**WORDS, **HEADS, "num_key_value_heads": 1}),
    "gemma": ("GemmaForCausalLM", {**WORDS, **HEADS, "num_key_value_heads": 1, "head_dim": 8}),
    "roberta": ("RobertaForSequenceClassification", {**WORDS, **HEADS}),
    "distilbert": ("DistilBertForSequenceClassification", {**WORDS, **DISTILBERT}),
    "deit": ("DeiTForImageClassification", {**HEADS, "image_size": 16, "patch_size": 4}),
    "swin": ("SwinForImageClassification", {**SWIN, "image_size": 32}),
    "convnext": ("ConvNextForImageClassification", {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2}),
}

WIDER = {"num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
GROUPED = {**WORDS, **WIDER, "num_key_value_heads": 2, "pad_token_id": 0}  # two heads of queries to one of keys
RELATIVE = {"use_relative_position_bias": True}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
PRUNABLE: dict[str, tuple[str, dict[str, Any]]] = {  # what only tests of smaller and of deeper models try
    "llama:grouped": ("LlamaForCausalLM", {**GROUPED, "tie_word_embeddings": True}),
    "llama:many": ("LlamaForCausalLM", {**GROUPED, "num_attention_heads": 8, "num_key_value_heads": 8}),
    "mistral:grouped": ("MistralForCausalLM", {**GROUPED, "head_dim": 12}),
    "qwen3:grouped": ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 8, "attention_bias": True}),
    "gemma:grouped": ("GemmaForCausalLM", {**GROUPED, "head_dim": 8}),
    "phi3:fused": ("Phi3ForCausalLM", GROUPED),
    "olmo2": ("Olmo2ForCausalLM", GROUPED),  # norms stand at the end of branches
    "lfm2:mixed": (
        "Lfm2ForCausalLM",
        {**GROUPED, "layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
    ),
    "bart:unequal": ("BartForConditionalGeneration", {**BART, **SPECIAL, "decoder_layers": 1}),
    "beit": ("BeitForImageClassification", {**HEADS, "image_size": 16, "patch_size": 4, **RELATIVE}),
    "smollm3:mixed": ("SmolLM3ForCausalLM", {**GROUPED, "no_rope_layers": [1, 0]}),  # a list with an entry per layer
    "mixtral:experts": ("MixtralForCausalLM", {**GROUPED, **EXPERTS}),
}


@cache
def root() -> str:
    """A folder that ends with this process. Not made before it is needed: a process that a test starts may end without
    removing one."""
    folder = tempfile.TemporaryDirectory(prefix="lowvram-hugging-")
    atexit.register(folder.cleanup)
    return folder.name


@cache
def tiny(kind: str) -> str:
    """The path of a folder that holds the configuration alone."""
    architecture, sizes = {**FAMILIES, **PRUNABLE}[kind]
    config = transformers.AutoConfig.for_model(kind.partition(":")[0], architectures=[architecture], **sizes)
    folder = f"{root()}/{kind.replace(':', '-')}"
    config.save_pretrained(folder)
    return folder


@cache
def with_weights(kind: str, num_labels: int = 5) -> str:
    """The path of a folder that holds weights, too."""
    architecture, _ = {**FAMILIES, **PRUNABLE}[kind]
    classes = {"num_labels": num_labels} if "Classification" in architecture else {}
    config, folder = transformers.AutoConfig.from_pretrained(tiny(kind), **classes), f"{tiny(kind)}-weights"
    torch.manual_seed(0)
    getattr(transformers, architecture)(config).save_pretrained(folder)
    return folder
