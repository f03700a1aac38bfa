"""Each text a sample: data=text and data=hub with data.samples=documents."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lowvram.config.errors import BadInput
from lowvram.core.rig import IGNORE
from lowvram.data.documents import Documents, Unit
from lowvram.data.hub import Hub
from lowvram.data.source import Data, Samples
from lowvram.data.spec import DataSpec, Modality, TextRules
from lowvram.data.text import Text
from lowvram.data.tokenizer import Pretrained
from tests.wordy import save_tokenizer

pytestmark = pytest.mark.usefixtures("datasets_offline")

TEXTS = [f"text {number} " + "la " * (number % 7) for number in range(40)]


def in_files(folder: Path, texts: list[str]) -> Text:
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:02}.txt").write_text(text)
    return Text(str(folder), samples=Unit.documents, sequence_length=24)


def in_lines(folder: Path, texts: list[str]) -> Hub:
    folder.mkdir()
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return Hub(str(folder / "texts.jsonl"), samples=Unit.documents, sequence_length=24)


MAKERS = [in_files, in_lines]
each_source = pytest.mark.parametrize("make", MAKERS)


def read(samples: Samples) -> list[str]:
    """The texts that samples make, put together where one goes on in the next, each with its end."""
    texts: list[bytes] = []
    is_open = False
    for index in range(len(samples)):
        inputs, targets = (
            each[: int((samples.sample(index, 0)[1] != IGNORE).sum())] for each in samples.sample(index, 0)
        )
        if is_open:
            texts[-1] += bytes(targets.tolist())
        else:
            texts.append(bytes([*inputs[:1].tolist(), *targets.tolist()]))
        is_open = texts[-1][-1:] != b"\n"
    return [text.decode() for text in texts]


@each_source
def test_each_text_is_a_sample_that_ends(tmp_path: Path, make) -> None:
    data: Data = make(tmp_path / "texts", TEXTS).open(seed=0)
    assert data.spec == DataSpec(Modality.TOKENS, 256, (24,))
    train, held_out = read(data.train), read(data.eval)
    assert sorted(train + held_out) == sorted(f"{text}\n" for text in TEXTS)
    assert len(held_out) == 4


@each_source
def test_a_long_text_goes_on_in_the_next_sample(tmp_path: Path, make) -> None:
    long = "".join(map(chr, range(33, 110)))
    data: Data = make(tmp_path / "texts", [long, "short", "held"]).open(seed=0)
    assert len(data.train) == 5
    assert read(data.train) == [f"{long}\n", "short\n"]
    lengths = [data.train.length(index, 0) for index in range(5)]  # pyright: ignore[reportAttributeAccessIssue]
    assert lengths == [24, 24, 24, 5, 5]
    assert [int((data.train.sample(index, 0)[1] != IGNORE).sum()) for index in range(5)] == lengths


@each_source
def test_an_empty_text_is_no_sample(tmp_path: Path, make) -> None:
    data: Data = make(tmp_path / "texts", ["one", "", "two", "three"]).open(seed=0)
    assert read(data.train) == ["one\n", "two\n"]


@each_source
def test_what_is_filled_up_has_the_models_token_and_no_target(tmp_path: Path, make) -> None:
    source = make(tmp_path / "texts", ["one", "two"])
    inputs, targets = source.read(TextRules(pad_id=7), 0).train.sample(0, 0)
    assert inputs.tolist() == [*b"one", *[7] * 21]
    assert targets.tolist() == [*b"ne\n", *[IGNORE] * 21]


@each_source
def test_an_evaluation_reads_as_many_as_it_is_told(tmp_path: Path, make) -> None:
    from dataclasses import replace

    source = replace(make(tmp_path / "texts", TEXTS), eval_samples=2)
    assert len(source.open(seed=0).eval) == 2


@each_source
def test_one_text_is_too_few(tmp_path: Path, make) -> None:
    with pytest.raises(
        BadInput, match=r"data\.(path|name)=.*: must be (at least two files with text|a data set with texts)"
    ):
        make(tmp_path / "texts", ["one"]).open(seed=0)


def test_every_tenth_file_is_held_out(tmp_path: Path) -> None:
    data = in_files(tmp_path / "texts", TEXTS[:25]).open(seed=0)
    assert read(data.eval) == [f"{TEXTS[9]}\n", f"{TEXTS[19]}\n"]


def test_lines_of_a_text_file_are_texts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(TEXTS))
    data = Hub(str(tmp_path / "a.txt"), samples=Unit.documents, sequence_length=40).open(seed=0)
    assert read(data.eval) == [f"{text}\n" for text in TEXTS[-4:]]


def test_texts_with_a_class_are_samples_by_themselves_anyway() -> None:
    with pytest.raises(BadInput, match=r"data\.samples='documents': must be windows where data.label is given"):
        Hub("a.csv", label="mood", samples=Unit.documents)


def test_tokens_are_made_once_for_windows_and_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    tokenise = Pretrained.encode

    def counted(self: Pretrained, texts: list[str]) -> list[np.ndarray]:
        calls.extend(text for text in texts if text != "\n")
        return tokenise(self, texts)

    monkeypatch.setattr(Pretrained, "encode", counted)
    file = tmp_path / "a.txt"
    file.write_text("the quick brown fox\n" * 60)
    words = str(save_tokenizer(tmp_path / "words", end="<end>"))
    for samples in (Unit.windows, Unit.documents, Unit.documents):
        Hub(str(file), samples=samples, tokenizer=words, sequence_length=4).open(seed=0)
    assert len(calls) == 60


def test_a_tokenizers_marks_are_there(tmp_path: Path) -> None:
    """What ends a text, and what a tokenizer begins one with, if that is its token of beginnings."""
    from transformers import AutoTokenizer

    folder = save_tokenizer(tmp_path / "words", end="<end>")
    assert len(Pretrained(AutoTokenizer.from_pretrained(str(folder))).opening) == 0
    inner = AutoTokenizer.from_pretrained(str(folder))
    inner.bos_token = "[CLS]"
    inner.save_pretrained(str(folder))
    (tmp_path / "a.txt").write_text("the fox\na lazy dog\nthe dog")
    source = Hub(str(tmp_path / "a.txt"), samples=Unit.documents, tokenizer=str(folder), sequence_length=8)
    inputs, targets = source.open(seed=0).train.sample(0, 0)
    first = inputs[:3].tolist() + targets[2:3].tolist()
    assert inner.convert_ids_to_tokens(first) == ["[CLS]", "the", "fox", "<end>"]


def test_the_longest_samples_are_counted() -> None:
    texts = [np.arange(length) for length in (3, 9, 30, 1, 6)]
    samples = Documents(lambda text: [texts[text]], np.array([len(text) for text in texts]), 16, 0)
    assert sorted(samples.length(index, 0) for index in range(len(samples))) == [2, 5, 8, 13, 16]
    assert [samples.longest(number) for number in (1, 2, 5, 7)] == [16, 29, 44, 73]
