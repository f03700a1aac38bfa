"""data=pairs: what a sample of two texts is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict

from lowvram.config.errors import BadInput
from lowvram.core.rig import IGNORE
from lowvram.data.bucketed import Bucketed
from lowvram.data.external import External
from lowvram.data.loader import collate
from lowvram.data.packed import Packed
from lowvram.data.pairs import Pairs
from lowvram.data.source import Data, Texts, resolve_source
from lowvram.data.spec import DataSpec, Modality, TextRules, pairs_layout
from lowvram.tasks import Auto
from tests.laboratory import TRANSFORMER
from tests.wordy import save_tokenizer

pytestmark = pytest.mark.usefixtures("datasets_offline")

ROWS = [{"asked": "ab" * (1 + number % 3), "said": "x" * (1 + number % 4)} for number in range(20)]
RULES = TextRules(pad_id=0, end_id=1, start_id=7)


def opened(folder: Path, rows: list[dict[str, Any]], rules: TextRules = RULES, **fields: Any) -> Data:
    Dataset.from_list(rows).to_parquet(str(folder / "a.parquet"))
    given = {"text": "asked", "target": "said", "sequence_length": 8, "target_length": 5}
    return Pairs(str(folder / "a.parquet"), **{**given, **fields}).read(rules, seed=0)


def test_the_second_text_is_predicted_from_the_first_and_its_own_beginning(tmp_path: Path) -> None:
    data = opened(tmp_path, ROWS)
    assert data.spec == DataSpec(Modality.PAIRS, 256, (8,), layout=pairs_layout(8, 5))
    assert (len(data.train), len(data.eval)) == (18, 2)
    inputs, targets = data.train.sample(1, epoch=3)
    assert bytes(inputs["input_ids"].tolist()) == b"abab\1\0\0\0"
    assert inputs["attention_mask"].tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert inputs["decoder_input_ids"].tolist() == [7, *b"xx", 0, 0]
    assert targets.tolist() == [*b"xx", 1, IGNORE, IGNORE]


def test_long_texts_are_cut_and_still_end(tmp_path: Path) -> None:
    inputs, targets = opened(tmp_path, [{"asked": "a" * 99, "said": "x" * 99}] * 4).train.sample(0, 0)
    assert bytes(inputs["input_ids"].tolist()) == b"a" * 7 + b"\1"
    assert bytes(targets.tolist()) == b"xxxx\1"
    assert inputs["decoder_input_ids"].tolist() == [7, *b"xxxx"]


def test_a_prefix_stands_before_each_text_that_is_read(tmp_path: Path) -> None:
    inputs, targets = opened(tmp_path, ROWS, prefix="q: ").train.sample(0, 0)
    assert bytes(inputs["input_ids"].tolist()) == b"q: ab\1\0\0"
    assert bytes(targets[:2].tolist()) == b"x\1"


def test_a_decoder_may_begin_with_the_last_token_of_what_it_writes(tmp_path: Path) -> None:
    inputs, targets = opened(tmp_path, ROWS, replace(RULES, start_id=None)).train.sample(1, 0)
    assert (inputs["decoder_input_ids"].tolist(), targets.tolist()) == ([1, *b"xx", 0, 0], [*b"xx", 1, IGNORE, IGNORE])


def test_the_tokenizers_marks_are_kept(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "words")
    rows = [{"asked": "the fox", "said": "a dog"}] * 4
    rules = TextRules(pad_id=0, end_id=3, start_id=2)
    inputs, targets = opened(tmp_path, rows, rules, tokenizer=str(folder)).train.sample(0, 0)
    ids = inputs["input_ids"].tolist()
    assert (ids[0], ids[3:], targets[0].item(), targets[3:].tolist()) == (2, [3, 0, 0, 0, 0], 2, [3, IGNORE])


def test_parts_of_a_column_of_dictionaries_are_columns(tmp_path: Path) -> None:
    rows = [{"translation": {"en": "yes", "de": "ja"}}] * 4
    inputs, targets = opened(tmp_path, rows, text="translation.en", target="translation.de").train.sample(0, 0)
    assert bytes(inputs["input_ids"].tolist()) == b"yes\1\0\0\0\0"
    assert bytes(targets[:3].tolist()) == b"ja\1"


def test_an_empty_text_is_a_text(tmp_path: Path) -> None:
    inputs, targets = opened(tmp_path, [{"asked": None, "said": ""}, *ROWS]).train.sample(0, 0)
    assert (inputs["input_ids"].tolist(), targets.tolist()) == ([1] + [0] * 7, [1, *[IGNORE] * 4])


def test_a_split_of_its_own_is_held_out(tmp_path: Path) -> None:
    parts: Any = {"train": Dataset.from_list(ROWS[:6]), "validation": Dataset.from_list(ROWS[6:])}
    DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    source = Pairs(str(tmp_path / "saved"), text="asked", target="said", sequence_length=8, target_length=5)
    data = replace(source, eval_samples=4).read(RULES, seed=0)
    assert (len(data.train), len(data.eval)) == (6, 4)


# Loaders


def test_both_texts_are_trimmed_and_counted(tmp_path: Path) -> None:
    data = opened(tmp_path, ROWS)
    assert isinstance(data.train, Texts)
    keys = [(0, 0), (1, 0)]  # ab -> x, abab -> xx, with an end each
    assert [data.train.length(*key) for key in keys] == [3 + 2, 5 + 3]
    part, whole = Bucketed(multiple=1).collate(data.train, keys), collate(data.train, keys)
    assert {name: tuple(tensor.shape) for name, tensor in part.inputs.items()} == {
        "input_ids": (2, 5),
        "attention_mask": (2, 5),
        "decoder_input_ids": (2, 3),
    }
    assert torch.equal(part.targets, whole.targets[:, :3])
    problem = Auto().pose(TRANSFORMER, data.spec)
    assert problem.token_counts(part).tolist() == [13, 16]
    assert problem.token_counts(whole).tolist() == [13, 26]
    assert problem.num_targets(part).item() == 5


def test_shapes_of_batches_are_few_where_both_lengths_are(tmp_path: Path, token_model: Callable[..., Any]) -> None:
    data = opened(tmp_path, ROWS)
    assert Bucketed(multiple=4).fit(data, token_model()).spec.has_few_shapes
    assert not Bucketed(multiple=1).fit(data, token_model()).spec.has_few_shapes
    with pytest.raises(BadInput, match="must be bucketed for pairs of texts"):
        Packed().fit(data, token_model())


def of_my_own() -> tuple[list[Any], list[Any]]:
    inputs = {"input_ids": [5, 1, 0], "attention_mask": [1, 1, 0], "decoder_input_ids": [0, 7]}
    return [{**inputs, "labels": [7, 1]}] * 4, [{**inputs, "labels": [7, 1]}] * 2


def test_samples_of_ones_own_may_be_pairs() -> None:
    data = External("tests.data.test_pairs.of_my_own", vocab_size=10).open(0)
    assert data.spec == DataSpec(Modality.PAIRS, 10, (3,), layout=pairs_layout(3, 2))
    part = Bucketed(multiple=1).collate(data.train, [(0, 0)])
    assert (part.inputs["input_ids"].tolist(), part.targets.tolist()) == ([[5, 1]], [[7, 1]])


# Refusals


def test_columns_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"data\.target='answer': must be one of the columns: asked, said"):
        opened(tmp_path, ROWS, target="answer")
    rows = [{"asked": "x", "said": 3}] * 4
    with pytest.raises(BadInput, match=r"data\.target='said': must be a column of texts; it is Value\('int64'\)"):
        opened(tmp_path, rows)


def test_other_models_are_refused(token_model: Callable[..., Any]) -> None:
    with pytest.raises(BadInput, match=r"data='pairs': must be a source of tokens"):
        resolve_source(Pairs("x", text="a", target="b"), token_model())
