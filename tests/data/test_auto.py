from __future__ import annotations

import pytest

from lowvram.config.errors import BadInput
from lowvram.data.auto import Auto
from lowvram.data.glyphs import Glyphs
from lowvram.data.python_packages import PythonPackages
from lowvram.data.python_source import PythonSource
from lowvram.data.source import ResolvedTextSource, Source, resolve_source
from lowvram.data.spec import Modality, TextRules
from lowvram.data.synthetic import Synthetic
from tests.data.conftest import FakeModel


def test_follows_the_model(token_model, image_model) -> None:
    assert Auto().resolve(token_model()) == PythonSource(sequence_length=32)
    assert Auto().resolve(image_model()) == Glyphs(image_size=24)


def test_texts_with_a_class_are_pieces_of_packages(classifier_of_texts) -> None:
    model = classifier_of_texts(text_rules=TextRules(pad_id=5))
    source = PythonPackages(sequence_length=32, eval_samples=7)
    assert Auto(eval_samples=7).resolve(model) == ResolvedTextSource(source, TextRules(pad_id=5))


@pytest.mark.parametrize("source", [Auto(), Synthetic()])
def test_a_model_that_does_not_say_what_it_reads_cannot_be_followed(source: Source) -> None:
    option = type(source).__name__.lower()
    with pytest.raises(BadInput, match=rf"model\.reads=null: must be one of TOKENS, .*IMAGES with data={option}"):
        resolve_source(source, FakeModel(None, (32,)))


def test_other_tensors_are_nothing_to_follow() -> None:
    with pytest.raises(BadInput, match=r"data='auto': must be a source of other tensors, .*: external$"):
        resolve_source(Auto(), FakeModel(Modality.OTHER, (32,)))


def test_hands_its_own_sizes_on(token_model, image_model) -> None:
    auto = Auto(sequence_length=16, image_size=40, eval_samples=5)
    assert auto.resolve(token_model()) == PythonSource(sequence_length=16, eval_samples=5)
    assert auto.resolve(image_model()) == Glyphs(image_size=40, eval_samples=5)


def test_cannot_be_opened_unresolved() -> None:
    with pytest.raises(BadInput, match="data='auto'"):
        Auto().open(seed=0)
