"""Lists of points beside grids. Sweeps themselves are in tests/cli/test_sweeps.py."""

from __future__ import annotations

from typing import Any

import pytest

from lowvram.cli.sweep import name_of, swept_keys, with_points
from lowvram.config.errors import BadInput

POINTS = {"baseline": "", "parts": "accum=x4", "both": "accum=x4 ckpt=every1"}


def test_each_point_of_a_list_has_its_words_and_its_name() -> None:
    batch = with_points([["model=resnet"]], POINTS)
    assert batch == [["model=resnet"], ["model=resnet", "accum=x4"], ["model=resnet", "accum=x4", "ckpt=every1"]]
    assert [name_of(words, swept_keys(batch)) for words in batch] == list(POINTS)


def test_a_typed_word_holds_for_all_points_and_what_is_the_same_then_is_left_out() -> None:
    batch = with_points([["accum=x2"]], POINTS)
    assert batch == [["accum=x2"], ["accum=x2", "ckpt=every1"]]
    assert [name_of(words, swept_keys(batch)) for words in batch] == ["baseline", "both"]


def test_a_list_is_run_for_each_point_of_a_grid() -> None:
    batch = with_points([["model=resnet", "seed=1"], ["model=gpt2", "seed=1"]], {"baseline": "", "parts": "accum=x4"})
    names = [name_of(words, swept_keys(batch)) for words in batch]
    assert names == ["baseline-resnet", "parts-resnet", "baseline-gpt2", "parts-gpt2"]


def test_without_a_list_a_grid_is_as_it_was() -> None:
    batch = [["seed=1"], ["seed=2"]]
    assert with_points(batch, None) is batch
    assert [name_of(words, swept_keys(batch)) for words in batch] == ["seed1", "seed2"]


@pytest.mark.parametrize("points", [5, {}, ["accum=x4"], {"a": 1}], ids=str)
def test_what_is_no_list_of_points_is_one_sentence(points: Any) -> None:
    with pytest.raises(BadInput, match=r"hydra\.sweeper\.points=.*must be names, each with the words of a point"):
        with_points([[]], points)
