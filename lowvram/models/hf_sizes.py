"""What sizes of samples models of transformers take."""

from __future__ import annotations

import math
from typing import Any

import torch

from lowvram.compat.torch_modes import without_dispatch_modes
from lowvram.config.errors import require
from lowvram.data.spec import DataSpec, Modality
from lowvram.models.hf_source import transformers

# Kinds (model_type) whose first token has the position after that of padding, so that they have fewer positions than
# their configurations say.
SHIFTED_KINDS = frozenset(
    {
        "camembert",
        "data2vec-text",
        "esm",
        "ibert",
        "layoutlmv3",
        "lilt",
        "longformer",
        "luke",
        "markuplm",
        "mpnet",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    }
)


def num_positions(config: Any) -> int | None:
    """The most tokens for which a model of texts has positions; None: not known."""
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and positions < 1:  # XLNet's -1: it takes any number
        return None
    learnt = getattr(config, "position_embedding_type", None) in (None, "absolute")  # an ESM may rotate instead
    is_shifted = positions is not None and learnt and config.model_type in SHIFTED_KINDS
    return positions - config.pad_token_id - 1 if is_shifted else positions


def check_texts(spec: DataSpec, num_positions: int | None, vocab_size: int | None) -> None:
    """Raises BadInput if texts are too long for a model, or have too large a vocabulary; None: any is fine."""
    longest = num_positions or math.inf
    most = f"at most {longest}, the model's positions"
    require(spec.shape[0] <= longest, "data.sequence_length", spec.shape[0], most)
    if spec.modality is Modality.PAIRS and spec.layout is not None:
        (target_length,) = spec.layout.targets.shape
        require(target_length <= longest, "data.target_length", target_length, most)
    most = f"at most {vocab_size}, the model's vocabulary: choose its own with data.tokenizer=auto, or bytes"
    require(spec.num_tokens <= (vocab_size or math.inf), "the data's vocabulary", spec.num_tokens, most)


def shapes_of(model_class: Any, config: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's parameters, by all of their names."""
    with without_dispatch_modes(), torch.device("meta"):
        parameters = model_class(config).named_parameters(remove_duplicate=False)
        return {name: tuple(parameter.shape) for name, parameter in parameters}


def check_windows(config: Any, image_size: int) -> None:
    """Raises BadInput if the last stage of a Swin has fewer patches on a side than its windows: its biases, one for
    each place of a window, are then too many."""
    if not isinstance(config, transformers.SwinConfig):
        return
    downscaling = config.patch_size * 2 ** (len(config.depths) - 1)
    least = downscaling * (config.window_size - 1) + 1
    allowed = f"at least {least}, so that a window (model.args.window_size={config.window_size}) fits the last stage"
    require(image_size >= least, "data.image_size", image_size, allowed)
