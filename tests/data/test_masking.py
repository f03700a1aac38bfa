"""Texts for masked language models: what is hidden, and that it is a function of seed, epoch and index."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import Tensor

from lowvram.config.errors import BadInput
from lowvram.core.rig import IGNORE
from lowvram.data.bucketed import Bucketed
from lowvram.data.documents import Unit
from lowvram.data.external import External
from lowvram.data.hub import Hub
from lowvram.data.masking import Masking
from lowvram.data.packed import Packed
from lowvram.data.source import Data, resolve_source
from lowvram.data.spec import DataSpec, Modality
from lowvram.data.text import Text
from lowvram.tasks import Auto
from tests.data.conftest import FakeModel
from tests.laboratory import TRANSFORMER
from tests.wordy import SENTENCES, save_tokenizer

pytestmark = pytest.mark.usefixtures("datasets_offline")

Sample = tuple[dict[str, Tensor], Tensor]


@pytest.fixture
def masked_model() -> Callable[..., Any]:
    return lambda **pinned: FakeModel(Modality.MASKED_TOKENS, (32,), **pinned)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("".join(f"{sentence}\n" for sentence in SENTENCES * 60))
    return tmp_path / "text.txt"


def opened(source: Any, model: Any, seed: int = 0) -> Data:
    return resolve_source(source, model).open(seed)


def whole(sample: Sample) -> Tensor:
    """The tokens of a sample before some were hidden."""
    inputs, targets = sample
    return targets.where(targets != IGNORE, inputs["input_ids"])


def same(one: Sample, other: Sample) -> bool:
    return torch.equal(one[0]["input_ids"], other[0]["input_ids"]) and torch.equal(one[1], other[1])


# What is hidden


def shares(inputs: np.ndarray, targets: np.ndarray, mask_id: int) -> list[float]:
    """The shares of tokens that are targets, and of these that are hidden, and unchanged."""
    is_target = targets != IGNORE
    return [is_target.mean(), (inputs == mask_id)[is_target].mean(), (inputs == targets)[is_target].mean()]


def test_as_many_tokens_are_hidden_and_replaced_as_by_the_librarys_collator(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, DataCollatorForLanguageModeling

    tokenizer = AutoTokenizer.from_pretrained(save_tokenizer(tmp_path / "words"))
    tokenizer.add_special_tokens({"mask_token": "[MASK]"})
    drawn = np.random.default_rng(0)
    tokens = drawn.integers(4, len(tokenizer) - 1, size=100_000)
    tokens[::10] = tokenizer.cls_token_id
    masking = Masking(tokenizer.mask_token_id, tuple(tokenizer.all_special_ids), len(tokenizer), 0.15)
    ours = masking(tokens, drawn)
    collator = DataCollatorForLanguageModeling(tokenizer, seed=0)
    theirs = collator([{"input_ids": tokens.tolist()}])
    found, wanted = (
        shares(inputs, targets, tokenizer.mask_token_id)
        for inputs, targets in (ours, (theirs["input_ids"][0].numpy(), theirs["labels"][0].numpy()))
    )
    assert found == pytest.approx(wanted, abs=0.01)
    assert found[0] == pytest.approx(0.15 * 0.9, abs=0.01)  # a tenth is special
    assert (ours[1][::10] == IGNORE).all()
    assert (ours[0] == tokens)[ours[1] == IGNORE].all()
    assert (ours[1] == tokens)[ours[1] != IGNORE].all()


def test_a_short_text_has_a_target_too() -> None:
    masking = Masking(9, (0,), 10, 0.15)
    for seed in range(20):
        _, targets = masking(np.array([0, 5, 0]), np.random.default_rng(seed))
        assert targets.tolist() == [IGNORE, 5, IGNORE]
    assert (masking(np.array([0, 0]), np.random.default_rng(0))[1] == IGNORE).all()


# When


def test_masks_are_a_function_of_seed_epoch_and_index(file: Path, masked_model: Callable[..., Any]) -> None:
    first, again, other = (opened(Text(str(file), tokenizer="bytes"), masked_model(), seed) for seed in (0, 0, 1))
    assert first.spec == DataSpec(Modality.MASKED_TOKENS, 256, (32,), is_padded=False)
    assert same(first.train.sample(3, 2), again.train.sample(3, 2))
    assert not same(first.train.sample(3, 2), first.train.sample(3, 1))
    assert not same(first.train.sample(3, 2), other.train.sample(3, 2))
    assert same(first.eval.sample(1, 0), other.eval.sample(1, 0))  # so that evaluations can be compared


def test_each_window_is_whole_but_for_what_is_hidden(file: Path, masked_model: Callable[..., Any]) -> None:
    data = opened(Text(str(file), tokenizer="bytes"), masked_model())
    text = file.read_bytes()
    for index in range(5):
        sample = data.train.sample(index, 0)
        assert bytes(whole(sample).tolist()) in text + text
        assert sample[0]["attention_mask"].tolist() == [1] * 32


def with_mask(folder: Path) -> Path:
    """A tokenizer with a mask token."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(save_tokenizer(folder))
    tokenizer.add_special_tokens({"mask_token": "[MASK]"})
    tokenizer.save_pretrained(folder)
    return folder


def test_a_tokenizers_marks_frame_each_window_and_are_never_hidden(
    file: Path, tmp_path: Path, masked_model: Callable[..., Any]
) -> None:
    folder = with_mask(tmp_path / "words")
    data = opened(Text(str(file), tokenizer=str(folder), sequence_length=16), masked_model())
    for index in range(20):
        inputs, targets = data.train.sample(index, 0)
        assert inputs["input_ids"][[0, -1]].tolist() == [2, 3]
        assert targets[[0, -1]].tolist() == [IGNORE, IGNORE]


@pytest.mark.parametrize("option", ["text", "hub"])
def test_texts_by_themselves_are_whole_and_framed(
    option: str, tmp_path: Path, masked_model: Callable[..., Any]
) -> None:
    from transformers import AutoTokenizer

    folder, texts = with_mask(tmp_path / "words"), [SENTENCES[number % 3] for number in range(20)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number:02}.txt").write_text(text)
    Dataset.from_dict({"text": texts}).to_parquet(str(tmp_path / "a.parquet"))
    fields: dict[str, Any] = {"samples": Unit.documents, "tokenizer": str(folder), "sequence_length": 16}
    source = Text(str(tmp_path), "*.txt", **fields) if option == "text" else Hub(f"{tmp_path}/a.parquet", **fields)
    data, known = opened(source, masked_model()), AutoTokenizer.from_pretrained(folder)
    assert data.spec == DataSpec(Modality.MASKED_TOKENS, len(known), (16,))
    ids = {tuple(known(text)["input_ids"]) for text in texts}
    for samples in (data.train, data.eval):
        found = {tuple(whole(samples.sample(i, 0))[: samples.length(i, 0)].tolist()) for i in range(len(samples))}  # pyright: ignore[reportAttributeAccessIssue]
        assert found <= ids
    assert found


def test_long_texts_go_on_in_the_next_sample(tmp_path: Path, masked_model: Callable[..., Any]) -> None:
    Dataset.from_dict({"text": ["abcdefgh"] * 10}).to_parquet(str(tmp_path / "a.parquet"))
    data = opened(Hub(f"{tmp_path}/a.parquet", samples=Unit.documents, sequence_length=4), masked_model())
    assert {bytes(whole(data.train.sample(index, 0)).tolist()) for index in range(4)} == {b"abcd", b"efgh"}


# Loaders and the task


def test_batches_are_trimmed_and_counted(tmp_path: Path, masked_model: Callable[..., Any]) -> None:
    Dataset.from_dict({"text": ["abc", "abcdef"] * 10}).to_parquet(str(tmp_path / "a.parquet"))
    data = opened(Hub(f"{tmp_path}/a.parquet", samples=Unit.documents), masked_model())
    part = Bucketed(multiple=1).collate(data.train, [(0, 0), (1, 0)])
    assert part.targets.shape == part.inputs["input_ids"].shape == (2, 6)
    problem = Auto().pose(TRANSFORMER, data.spec)
    assert problem.token_counts(part).tolist() == [9, 12]
    assert 2 <= problem.num_targets(part).item() < 9
    with pytest.raises(BadInput, match="must be bucketed for masked tokens"):
        Packed().fit(data, masked_model())


def of_my_own() -> tuple[list[Any], list[Any]]:
    sample = {"input_ids": [5, 9, 7, 0], "attention_mask": [1, 1, 1, 0], "labels": [-100, 6, -100, -100]}
    return [sample] * 4, [sample] * 2


def test_samples_of_ones_own_may_be_masked(masked_model: Callable[..., Any]) -> None:
    data = opened(External("tests.data.test_masking.of_my_own"), masked_model(vocab_size=10))
    assert data.spec == DataSpec(Modality.MASKED_TOKENS, 10, (4,))
    assert data.train.sample(0, 0)[1].tolist() == [-100, 6, -100, -100]
    assert Bucketed(multiple=1).collate(data.train, [(0, 0)]).targets.tolist() == [[-100, 6, -100]]


# Refusals


def test_a_tokenizer_without_a_mask_is_refused(file: Path, tmp_path: Path, masked_model: Callable[..., Any]) -> None:
    folder = save_tokenizer(tmp_path / "words")
    with pytest.raises(BadInput, match=r"data\.tokenizer='.*words': must be one with a mask token"):
        opened(Text(str(file), tokenizer=str(folder)), masked_model())
    folder = with_mask(tmp_path / "words")
    with pytest.raises(BadInput, match=r"data\.sequence_length=2: must be more than 2, the tokenizer's marks"):
        opened(Text(str(file), tokenizer=str(folder), sequence_length=2), masked_model())


def test_texts_with_a_class_are_not_masked(masked_model: Callable[..., Any]) -> None:
    with pytest.raises(BadInput, match=r"data='hub': must be a source of masked tokens"):
        resolve_source(Hub("x", label="mood"), masked_model())
