"""Presets for cards of 6 to 24 GB: each is planned to fit its card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lowvram.config.defaults import CONF
from lowvram.models.hf_source import transformers
from tests.planning.test_worker import planned
from tests.tiers import first_of

pytestmark = pytest.mark.medium

# The configurations that the hub has under these names, as far as they matter for memory.
BERT = {"architectures": ["BertForMaskedLM"]}  # of the base size, which is the library's own


Llm = tuple[str, dict[str, Any]]  # the kind of model, and its sizes


def llm(kind: str, width: int, mlp: int, layers: int, heads: tuple[int, int], vocab: int, **more: Any) -> Llm:
    sizes = {"hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": layers, "vocab_size": vocab}
    sizes |= {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "max_position_embeddings": 32_768}
    architecture = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[kind]
    return kind, {"architectures": [architecture], **sizes, **more}


QWEN_05B = llm("qwen2", 896, 4864, 24, (14, 2), 151_936, tie_word_embeddings=True)
QWEN_15B = llm("qwen2", 1536, 8960, 28, (12, 2), 151_936, tie_word_embeddings=True)
QWEN_3B = llm("qwen2", 2048, 11_008, 36, (16, 2), 151_936, tie_word_embeddings=True)
QWEN_4B = llm("qwen3", 2560, 9728, 36, (32, 8), 151_936, tie_word_embeddings=True, head_dim=128)
QWEN_8B = llm("qwen3", 4096, 12_288, 36, (32, 8), 151_936, tie_word_embeddings=False, head_dim=128)
QWEN_14B = llm("qwen3", 5120, 17_408, 40, (40, 8), 151_936, tie_word_embeddings=False, head_dim=128)
LLAMA_8B = llm("llama", 4096, 14_336, 32, (32, 8), 128_256, tie_word_embeddings=False)
LONG_8B = llm("llama", 4096, 14_336, 32, (32, 8), 128_256, tie_word_embeddings=False, max_position_embeddings=131_072)
LLAMA_70B = llm("llama", 8192, 28_672, 80, (64, 8), 128_256, tie_word_embeddings=False)
# By preset: the model, the tokens of a sequence, and the card.
CARDS: dict[str, tuple[Llm, int, list[str]]] = {
    "qlora_8gb": (QWEN_3B, 1024, ["plan.device=rtx3070"]),
    "full_500m_6gb": (QWEN_05B, 1024, ["plan.device=rtx3060", "vram=6GiB"]),
    "full_1500m_8gb": (QWEN_15B, 1024, ["plan.device=rtx3070"]),
    "full_3b_12gb": (QWEN_3B, 1024, ["plan.device=rtx3060"]),
    "full_4b_16gb": (QWEN_4B, 1024, ["plan.device=rtx4090", "vram=16GiB"]),
    "full_8b_24gb": (QWEN_8B, 1024, ["plan.device=rtx3090"]),
    "full_8b_8gb": (LLAMA_8B, 2048, ["plan.device=rtx3070"]),
    "full_14b_8gb": (QWEN_14B, 2048, ["plan.device=rtx3070"]),
    "full_8b_2x24gb": (QWEN_8B, 1024, ["plan.device=rtx3090"]),
    "full_14b_4x24gb": (QWEN_14B, 1024, ["plan.device=rtx3090"]),
    "lora_70b_4x24gb": (LLAMA_70B, 1024, ["plan.device=rtx3090"]),
    "qlora_3b_6gb": (QWEN_3B, 1024, ["plan.device=rtx3060", "vram=6GiB"]),
    "lora_4b_12gb": (QWEN_4B, 1024, ["plan.device=rtx3060"]),
    "lora_8b_24gb": (QWEN_8B, 1024, ["plan.device=rtx3090"]),
    "qlora_8b_8gb": (LLAMA_8B, 512, ["plan.device=rtx3070"]),
    "long_8b_8gb": (LONG_8B, 65_536, ["plan.device=rtx3070"]),
}
NAMES = ["gpt2_in_parts", "gpt2_scratch_8gb", "resnet50_8gb", "finetune_bert_8gb", *CARDS]


def given(name: str, folder: Path) -> list[str]:
    """What a user without a network says."""
    if name == "finetune_bert_8gb":
        transformers.AutoConfig.for_model("bert", **BERT).save_pretrained(folder)
        rows = "".join(f"a text of class {number % 2},{number % 2}\n" for number in range(64))
        (folder / "texts.csv").write_text(f"text,label\n{rows}")
        return [f"model.name={folder}", f"data.name={folder / 'texts.csv'}", "plan.device=rtx3070"]
    if name not in CARDS:
        return ["data=synthetic", "plan.device=rtx3070"]
    (kind, sizes), length, card = CARDS[name]
    transformers.AutoConfig.for_model(kind, **sizes).save_pretrained(folder)
    return ["data=synthetic", f"data.sequence_length={length}", f"model.name={folder}", *card]


@pytest.mark.parametrize("name", first_of(NAMES))
@pytest.mark.slow
def test_a_preset_fits_its_card(name: str, tmp_path: Path) -> None:
    plan = planned(f"experiment={name}", *given(name, tmp_path))
    assert plan["fits"], plan["least_vram_bytes"]


def test_every_preset_for_a_card_is_planned() -> None:
    assert {path.stem for path in (CONF / "experiment").glob("*gb.yaml")} <= set(NAMES)
