"""Presets for a card of 8 GB: each is planned to fit it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lowvram.models.hf_source import transformers
from tests.planning.test_worker import planned
from tests.tiers import first_of

# The configurations that the hub has under these names, as far as they matter for memory.
BERT = {"architectures": ["BertForMaskedLM"]}  # of the base size, which is the library's own
QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
HUGGING_FACE: dict[str, tuple[str, dict[str, Any]]] = {
    "finetune_bert_8gb": ("bert", BERT),
    "qlora_8gb": ("qwen2", QWEN),
}
NAMES = ["gpt2_in_parts", "gpt2_scratch_8gb", "resnet50_8gb", *HUGGING_FACE]


def given(name: str, folder: Path) -> list[str]:
    """What a user without a network says."""
    if name not in HUGGING_FACE:
        return ["data=synthetic"]
    kind, sizes = HUGGING_FACE[name]
    transformers.AutoConfig.for_model(kind, **sizes).save_pretrained(folder)
    if kind != "bert":
        return ["data=synthetic", "data.sequence_length=1024", f"model.name={folder}"]
    rows = "".join(f"a text of class {number % 2},{number % 2}\n" for number in range(64))
    (folder / "texts.csv").write_text(f"text,label\n{rows}")
    return [f"model.name={folder}", f"data.name={folder / 'texts.csv'}"]


@pytest.mark.parametrize("name", first_of(NAMES, 4))
def test_a_preset_fits_a_card_of_8_gb(name: str, tmp_path: Path) -> None:
    plan = planned(f"experiment={name}", *given(name, tmp_path), "plan.device=rtx3070")
    assert plan["fits"], plan["least_vram_bytes"]
