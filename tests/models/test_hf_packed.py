"""Which models of transformers keep sequences of one row apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lowvram.config.errors import BadInput
from lowvram.core.rig import Part
from lowvram.data.loader import collate
from lowvram.data.packed import Packed
from lowvram.data.spec import DataSpec, Modality
from lowvram.models.hf import Head, HfConfig
from lowvram.models.hf_packed import PACKED_KINDS
from lowvram.models.hf_source import transformers
from tests.hugging import tiny
from tests.laboratory import documents

SIZES: dict[str, Any] = {  # by all the names that configurations have for them
    **dict.fromkeys(("hidden_size", "n_embd"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 32),
    "vocab_size": 100,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rotary_dim": 4,
    "num_local_experts": 4,
    "word_embed_proj_dim": 32,
    "d_model": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LEAKY = {"falcon", "opt", "xglm"}
SPEC = DataSpec(Modality.TOKENS, 100, (32,))
WIDE = [32, 32, 6, 4, 2]  # of sequences whose rows are wider than a model has positions
NARROW = [9, 20, 5, 12, 3, 7]


def shrunk(kind: str) -> Any:
    """A tiny model whose layers matter."""
    known = transformers.AutoConfig.for_model(kind).to_dict()
    sizes = {name: size for name, size in SIZES.items() if name in known}
    window = {"sliding_window": 8} if known.get("sliding_window") else {}
    config = transformers.AutoConfig.for_model(kind, **sizes, **window, use_cache=False)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    return model


@torch.no_grad()
def loss_of(model: Any, batch: Part) -> float:
    inputs = batch.inputs if isinstance(batch.inputs, dict) else {"input_ids": batch.inputs}
    return F.cross_entropy(model(**inputs).logits.double().flatten(0, 1), batch.targets.flatten()).item()


def error(kind: str, lengths: list[int]) -> float:
    texts, keys = documents([length + 1 for length in lengths], SPEC), [(index, 0) for index in range(len(lengths))]
    packed, model = Packed().collate(texts, keys), shrunk(kind)
    assert len(packed.targets) == 2
    return abs(loss_of(model, packed) - loss_of(model, collate(texts, keys)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", sorted(PACKED_KINDS))
def test_a_kind_that_is_known_keeps_the_loss(kind: str) -> None:
    assert max(error(kind, WIDE), error(kind, NARROW)) <= 1e-6


@pytest.mark.parametrize("kind", sorted(LEAKY))
def test_others_are_refused_for_a_reason(kind: str, tmp_path: Path) -> None:
    assert error(kind, NARROW) > 1e-4
    config = transformers.AutoConfig.for_model(kind, architectures=["XForCausalLM"])
    config.save_pretrained(str(tmp_path))
    with pytest.raises(
        BadInput, match=f"loader='packed': must be bucketed for a model of the kind {kind}: only codegen,"
    ):
        HfConfig(str(tmp_path), head=Head.causal_lm).check_packed()


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_those_of_the_suite_are_known(kind: str) -> None:
    HfConfig(tiny(kind)).check_packed()
