from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lowvram.config.errors import BadInput
from lowvram.data import python_packages
from lowvram.data.python_packages import PACKAGES, PythonPackages
from lowvram.data.source import Data
from lowvram.data.spec import DataSpec, Modality, TextRules


@pytest.fixture(scope="module")
def data() -> Data:
    return PythonPackages(sequence_length=64, eval_samples=20).open(seed=0)


def test_samples_are_pieces_of_uneven_length_with_a_class(data: Data) -> None:
    assert data.spec == DataSpec(Modality.LABELLED_TOKENS, len(PACKAGES), (64,), 256)
    assert (len(data.train), len(data.eval)) == (50_000, 20)
    samples = [data.train.sample(index, 0) for index in range(40)]
    assert [int(label) for _, label in samples] == [*range(len(PACKAGES))] * 4
    lengths = {int(inputs["attention_mask"].sum()) for inputs, _ in samples}
    assert min(lengths) >= 16
    assert max(lengths) <= 64
    assert len(lengths) > 10


def test_pieces_are_of_the_package(data: Data) -> None:
    train, held_out = python_packages.package_texts()
    for samples, texts in ((data.train, train), (data.eval, held_out)):
        inputs, label = samples.sample(3, 0)
        piece = bytes(inputs["input_ids"][: inputs["attention_mask"].sum()].tolist())
        text = texts[int(label)]
        assert piece in bytes(text.read(0, len(text)))


def test_a_sample_is_pure_and_new_in_each_epoch(data: Data) -> None:
    def ids(epoch: int) -> torch.Tensor:
        return data.train.sample(7, epoch)[0]["input_ids"]

    assert torch.equal(ids(1), ids(1))
    assert not torch.equal(ids(1), ids(2))


def test_what_the_model_asks_of_texts_is_done(classifier_of_texts) -> None:
    model = classifier_of_texts(text_rules=TextRules(pad_id=7, end_id=3))
    inputs, _ = PythonPackages().resolve(model).open(seed=0).train.sample(0, 0)
    length = int(inputs["attention_mask"].sum())
    assert inputs["input_ids"].shape == (32,)
    assert inputs["input_ids"][length - 1 :].tolist() == [3] + [7] * (32 - length)


def test_a_python_without_its_source_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"asyncio/x.py": Path(__file__)}
    monkeypatch.setattr(python_packages, "library_files", lambda: here)
    with pytest.raises(BadInput, match=r"data='python_packages': must be another source: .* email, .*, xml$"):
        PythonPackages(sequence_length=8).open(seed=0)
