"""The models of other people's measurements, by the names that they use. Their weights aren't loaded: sizes are enough.

torchvision is needed for the image models: `scripts/python -m pip install --no-deps torchvision==0.28.0`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import lowvram
from lowvram.api import ModuleTask

# What describes torchvision's compiled operators is left out: its models call none of them, and not every build of
# torch finds them in the wheel.
NOT_NEEDED = "torchvision._meta_registrations"
sys.modules.setdefault(NOT_NEEDED, ModuleType(NOT_NEEDED))

NUM_TOKENS, IMAGE_PIXELS, NUM_VOCABULARY = 128, 86, 1000  # of a text; on each side; ids that every model knows

# By their names: the function of torchvision.models, and its arguments.
IMAGE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "ConvNeXtBase": ("convnext_base", {}),
    "ConvNeXtTiny": ("convnext_tiny", {}),
    "MnasNet": ("mnasnet1_0", {"num_classes": 10}),
    "MobeNetV3Large": ("mobilenet_v3_large", {"num_classes": 10}),
    "MobeNetV3Small": ("mobilenet_v3_small", {"num_classes": 10}),
    "MobileNetV2": ("mobilenet_v2", {}),
    "RegNetX400MF": ("regnet_x_400mf", {}),
    "RegNetY400MF": ("regnet_y_400mf", {}),
    "ResNet50": ("resnet50", {}),
    "ResNet101": ("resnet101", {}),
    "ResNet152": ("resnet152", {}),
    "VGG11": ("vgg11", {}),
    "VGG16": ("vgg16", {}),
    "VGG19": ("vgg19", {}),
}

# By their names: transformers' model_type, and what differs from its defaults.
LANGUAGE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "distilbert/distilgpt2": ("gpt2", {"n_layer": 6}),
    "cerebras/Cerebras-GPT-111M": (
        "gpt2",
        {"n_embd": 768, "n_layer": 10, "n_positions": 2048, "n_inner": 3072, "activation_function": "gelu"},
    ),
    "facebook/opt-125m": ("opt", {"hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 12}),
    "facebook/opt-350m": (
        "opt",
        {
            "hidden_size": 1024,
            "ffn_dim": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "word_embed_proj_dim": 512,
            "do_layer_norm_before": False,
        },
    ),
    "EleutherAI/gpt-neo-125M": (
        "gpt_neo",
        {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "attention_types": [[["global", "local"], 6]]},
    ),
    "T5-small": ("t5", {"decoder_start_token_id": 0}),
    "google/gemma-2-2b-it": ("gemma2", {}),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": (
        "qwen2",
        {
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "vocab_size": 151_936,
            "tie_word_embeddings": False,
        },
    ),
}


class WithLoss(nn.Module):
    """A language model that also computes its loss; what it returns lives as long as the loop's `outputs`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Any:
        return self.model(**batch)


def loss_sum(outputs: Any, targets: Tensor) -> Tensor:
    return outputs.loss * targets.numel()


def task_of(name: str) -> tuple[ModuleTask, Tensor]:
    """The task of a model, and the targets of two samples."""
    if name in IMAGE_MODELS:
        function, args = IMAGE_MODELS[name]
        model = getattr(import_module("torchvision.models"), function)(**args)
        inputs = torch.randn(2, 3, IMAGE_PIXELS, IMAGE_PIXELS)
        return lowvram.task(model, inputs, nn.CrossEntropyLoss()), torch.zeros(2, dtype=torch.long)
    kind, sizes = LANGUAGE_MODELS[name]
    ids = torch.randint(NUM_VOCABULARY, (2, NUM_TOKENS))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    return lowvram.task(WithLoss(language_model(kind, sizes)), batch, loss_sum), ids


def language_model(kind: str, sizes: dict[str, Any]) -> nn.Module:
    """Without memory for its weights: plans need none."""
    config = transformers.AutoConfig.for_model(kind, **sizes)
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model: Any = auto.from_config(config)
    return model.train()
