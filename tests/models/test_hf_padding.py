"""Classifiers of transformers read their logits at the end of each text, whatever their tokenizer and configuration say
of padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowvram.config.errors import BadInput
from lowvram.data.hub import Hub
from lowvram.data.padding import padding_token
from lowvram.data.source import resolve_source
from lowvram.data.spec import IDS, MASK
from lowvram.data.tokenizer import Bytes, choose_tokenizer
from lowvram.models.hf import HfConfig
from lowvram.models.hf_heads import Head
from lowvram.models.hf_source import transformers

pytestmark = pytest.mark.usefixtures("offline_datasets")

WORDS = ["!", "a", "b", "c", "d"]  # tokens 0 to 4
SPECIAL = ["<begin>", "<end>", "<turn>", "<pad>"]  # tokens 5 to 8
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
    "gpt_neox": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
    "xlnet": {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24},
    "opt": {
        "hidden_size": 16,
        "ffn_dim": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
    "bert": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
}


@pytest.fixture
def offline_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


def save(folder: Path, kind: str, marks: dict[str, str], config: dict[str, Any], num_unused: int = 0) -> str:
    """A model's configuration and a tokenizer, in which "!" is token 0. Returns the folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [*WORDS, *SPECIAL]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **marks).save_pretrained(str(folder))
    made = transformers.AutoConfig.for_model(kind, vocab_size=len(words) + num_unused, **SIZES[kind])
    made.word_embed_proj_dim = 16  # of OPT
    for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
        setattr(made, name, config.get(name))
    made.save_pretrained(str(folder))
    return str(folder)


def texts(folder: Path) -> str:
    """Texts of 1 to 6 words of which many end with "!"."""
    rows = [f"{' '.join('abcd'[(n * k) % 4] for k in range(n % 6))} {'!' if n % 2 else 'a'},{n % 2}" for n in range(40)]
    (folder / "texts.csv").write_text("text,loud\n" + "\n".join(rows))
    return str(folder / "texts.csv")


def logits(model: Any, **inputs: Tensor) -> Tensor:
    return model(**inputs).logits


CASES: dict[str, tuple[dict[str, str], dict[str, Any], int | None]] = {  # tokenizer, configuration, the token that pads
    "several end tokens": ({"bos_token": "<begin>", "eos_token": "<turn>"}, {"eos_token_id": [6, 7]}, 7),
    "several end tokens, of which the tokenizer names none": ({}, {"eos_token_id": [10, 9]}, 10),
    "only the tokenizer has one": ({"pad_token": "<pad>", "eos_token": "<end>"}, {"eos_token_id": 6}, 8),
    "a text's token": ({"pad_token": "<pad>"}, {"pad_token_id": 0, "eos_token_id": 6}, 8),
    "no token": ({"eos_token": "<end>"}, {"pad_token_id": -1, "eos_token_id": 6}, 6),
    "beyond the vocabulary": ({"pad_token": "<pad>"}, {"pad_token_id": 300}, 8),
    "the configuration's": ({"pad_token": "<pad>", "eos_token": "<end>"}, {"pad_token_id": 6}, 6),
    "one that nobody uses": ({}, {}, 9),
    "only a beginning": ({"bos_token": "<begin>"}, {}, 5),
}


def test_padding_changes_no_logits(tmp_path: Path) -> None:
    for number, (case, (marks, config, pad_id)) in enumerate(CASES.items()):
        for kind in SIZES if number < 2 else ("llama",):
            folder = tmp_path / f"{number}{kind}"
            unused = 0 if case == "only a beginning" else 2
            hf = HfConfig(save(folder, kind, marks, config, unused), head=Head.sequence_classification)
            source = Hub(texts(folder), label="loud", sequence_length=10)
            data = resolve_source(source, hf).open(0)
            torch.manual_seed(0)
            model: Any = hf.make(data.spec).eval()
            samples = [data.train.sample(index, 0)[0] for index in range(len(data.train))]
            batch = {name: torch.stack([sample[name] for sample in samples]) for name in (IDS, MASK)}
            alone = [{name: sample[name][None, : int(sample[MASK].sum())] for name in sample} for sample in samples]
            wanted = torch.cat([logits(model, **inputs) for inputs in alone])
            assert torch.allclose(logits(model, **batch), wanted, atol=1e-5), (case, kind)
            assert kind == "bert" or model.config.pad_token_id == pad_id, (case, kind)
            assert kind == "bert" or set(batch[IDS][batch[MASK] == 0].tolist()) == {pad_id}, (case, kind)


def test_data_may_pad_otherwise(tmp_path: Path) -> None:
    """data=external pads with whatever it likes."""
    name = save(tmp_path, "llama", {}, {"eos_token_id": [6, 7]})
    hf = HfConfig(name, head=Head.sequence_classification)
    data = resolve_source(Hub(texts(tmp_path), label="loud", sequence_length=10), hf).open(0)
    model: Any = hf.make(data.spec).eval()
    ids, mask = torch.tensor([[1, 0, 3, 3], [2, 2, 2, 0]]), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    wanted = [
        logits(model, input_ids=row[None, :n], attention_mask=torch.ones(1, n))
        for row, n in zip(ids, (2, 4), strict=True)
    ]
    assert torch.allclose(logits(model, input_ids=ids, attention_mask=mask), torch.cat(wanted), atol=1e-5)


def test_no_token_that_can_pad_is_a_refusal(tmp_path: Path) -> None:
    folder = save(tmp_path, "llama", {}, {})
    source = Hub(texts(tmp_path), label="loud", sequence_length=10)
    with pytest.raises(BadInput, match=r"^model\.args\.pad_token_id=null: must be the number of a token that is in no"):
        resolve_source(source, HfConfig(folder, head=Head.sequence_classification)).open(0)
    typed = HfConfig(folder, head=Head.sequence_classification, args={"pad_token_id": 4})
    assert resolve_source(source, typed).open(0).spec.pad_id == 4
    assert HfConfig(folder, head=Head.causal_lm).text_rules.pad_id is None


def test_bytes_are_padded_by_no_byte_where_the_model_knows_more(tmp_path: Path) -> None:
    rules = HfConfig(save(tmp_path, "llama", {}, {"eos_token_id": [6, 7]}, 300), head=Head.causal_lm).text_rules
    assert padding_token(Bytes(), rules) == 256
    assert padding_token(choose_tokenizer(str(tmp_path), rules), rules) == 9


def test_tokens_that_the_model_has_no_embedding_for_matter_only_in_texts(tmp_path: Path) -> None:
    """A [PAD] that was added to the tokenizer, without embeddings for it."""
    folder = save(tmp_path, "llama", {"eos_token": "<end>"}, {"eos_token_id": 6})
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(folder)
    hf, source = (
        HfConfig(folder, head=Head.sequence_classification),
        Hub(texts(tmp_path), label="loud", sequence_length=10),
    )
    spec = resolve_source(source, hf).open(0).spec
    assert (spec.num_tokens, spec.pad_id) == (9, 6)
    hf.make(spec)
    with (tmp_path / "texts.csv").open("a") as file:
        file.write("\na [PAD] b,1")
    with pytest.raises(
        BadInput, match=r"data\.tokenizer=.*its token 9 \(\[PAD\]\), and the model has embeddings for 9: res"
    ):
        resolve_source(source, hf).open(0)
