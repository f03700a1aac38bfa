from __future__ import annotations

import pytest

from lowvram.config import BadInput
from lowvram.data.auto import Auto
from lowvram.data.glyphs import Glyphs
from lowvram.data.python_source import PythonSource


def test_follows_the_model(token_model, image_model) -> None:
    assert Auto().resolve(token_model()) == PythonSource(sequence_length=32)
    assert Auto().resolve(image_model()) == Glyphs(image_size=24)


def test_hands_its_own_sizes_on(token_model, image_model) -> None:
    auto = Auto(sequence_length=16, image_size=40, eval_samples=5)
    assert auto.resolve(token_model()) == PythonSource(sequence_length=16, eval_samples=5)
    assert auto.resolve(image_model()) == Glyphs(image_size=40, eval_samples=5)


def test_cannot_be_opened_unresolved() -> None:
    with pytest.raises(BadInput, match="data='auto'"):
        Auto().open(seed=0)
