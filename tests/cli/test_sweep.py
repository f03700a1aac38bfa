"""Lists of points beside grids. Sweeps themselves are in tests/cli/test_sweeps.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from lowvram.cli.sweep import axes_of, grid, names_of, swept_keys, with_points
from lowvram.cli.swept_fields import folders_in, with_fields_of_swept
from lowvram.config.errors import BadInput

POINTS = {"baseline": "", "parts": "accum=x4", "both": "accum=x4 ckpt=every1"}


def listed(words: list[str], max_batch_size: int | None = None) -> list[list[str]]:
    """The points of each batch, their words with blanks between."""
    batches = grid(OverridesParser.create().parse_overrides(words), max_batch_size)
    return [[" ".join(point) for point in batch] for batch in batches]


def test_a_grid_holds_all_combinations_the_last_key_fastest() -> None:
    assert listed(["a=1,2", "c=5", "b=x,y"]) == [["a=1 c=5 b=x", "a=1 c=5 b=y", "a=2 c=5 b=x", "a=2 c=5 b=y"]]
    assert listed(["a=1,2,3"], 2) == [["a=1", "a=2"], ["a=3"]]
    assert listed(["+a=range(1,3)", "b={x:1},[2]", "~d"]) == [
        ["+a=1 b={x:1} ~d=null", "+a=1 b=[2] ~d=null", "+a=2 b={x:1} ~d=null", "+a=2 b=[2] ~d=null"]
    ]


def test_the_last_word_for_a_key_holds_in_the_place_of_the_first() -> None:
    assert listed(["a=1,2", "b=3", "a=4"]) == [["a=4 b=3"]]


def test_a_sweep_without_values_is_a_mistake() -> None:
    for value in ("interval(0,1)", "range(1,1)", "range(1,5,0)"):
        with pytest.raises(BadInput, match=re.escape(f"lr='{value}': must be a list of values, such as lr=1,2")):
            listed([f"lr={value}"])


def test_a_point_in_a_list_is_words_as_a_shell_reads_them() -> None:
    with pytest.raises(BadInput, match=r"points\.a=.*: must be words as a shell reads them: No closing"):
        with_points([[]], {"a": "name='x"})


def test_fields_of_a_swept_group_are_set_in_its_points_alone() -> None:
    """`adapter=none`, the default, has no rank."""
    words = ["-m", "adapter=lora,qlora", "adapter.rank=8", "adapter.targets=[a,b]", "train.steps=3", "ckpt.every=2,3"]
    changed = ["adapter.rank=choice(8)", "adapter.targets=choice([a,b])"]
    assert with_fields_of_swept(words) == [*words[:2], *changed, *words[4:]]
    assert listed(with_fields_of_swept(words)[1:4]) == [
        [f"adapter={option} adapter.rank=8 adapter.targets=[a,b]" for option in ("lora", "qlora")]
    ]
    for others in (words[1:], ["-m", "adapter=lora", "adapter.rank=8"], ["-m", "a=1,2", "b.c=3", "x={y", "~a.b"]):
        assert with_fields_of_swept(others) == others


def test_so_they_are_where_points_or_params_choose_the_group(tmp_path: Path) -> None:
    """Typed, or in a preset of lowvram's or of the user's own."""
    (tmp_path / "sweep").mkdir()
    sweeper = 'hydra: {mode: MULTIRUN, sweeper: {points: {a: "ckpt=none adapter=lora", b: adapter=qlora}}}'
    (tmp_path / "sweep" / "mine.yaml").write_text(f"# @package _global_\n{sweeper}\n")
    folder = str(tmp_path)
    for words in (
        ["-m", 'hydra.sweeper.points={a: "adapter=lora", b: "adapter=qlora ckpt=none"}'],
        ["-m", "hydra.sweeper.points.a='adapter=lora'", "hydra.sweeper.points.b='adapter=qlora'"],
        ["-m", "hydra.sweeper.params={adapter: 'lora,qlora'}"],
        ["--config-dir", folder, "sweep=mine"],
        [f"--config-dir={folder}", "-m", "sweep=mine"],
    ):
        fields = ["adapter.rank=8", "model.width=32", "+adapter.more=1"]
        assert with_fields_of_swept([*words, *fields]) == [*words, "adapter.rank=choice(8)", *fields[1:]], words
    assert with_fields_of_swept(["sweep=compression", "qat.bits=3"]) == ["sweep=compression", "qat.bits=choice(3)"]
    for others in (
        ["sweep=nowhere", "adapter.rank=8"],
        ["sweep=compression", "adapter.rank=8"],
        ["-m", "hydra.sweeper.points=[1]", "adapter.rank=8"],
        ["-m", 'hydra.sweeper.points={a: "x=\\"y"}', "adapter.rank=8"],
        ["hydra.sweeper.points={a: 'adapter=lora'}", "adapter.rank=8"],  # one run
    ):
        assert with_fields_of_swept(others) == others


def test_each_point_of_a_list_has_its_words_and_its_name() -> None:
    batch, named = with_points([["model=resnet"]], POINTS)
    assert batch == [["model=resnet"], ["model=resnet", "accum=x4"], ["model=resnet", "accum=x4", "ckpt=every1"]]
    assert [names_of(words, swept_keys(batch), [], named).point for words in batch] == list(POINTS)


def test_a_typed_word_holds_for_all_points_and_what_is_the_same_then_is_left_out() -> None:
    batch, named = with_points([["accum=x2"]], POINTS)
    assert batch == [["accum=x2"], ["accum=x2", "ckpt=every1"]]
    assert [names_of(words, swept_keys(batch), [], named).point for words in batch] == ["baseline", "both"]


def test_a_list_is_run_for_each_point_of_a_grid() -> None:
    models = [["model=resnet", "seed=1"], ["model=gpt2", "seed=1"]]
    batch, named = with_points(models, {"baseline": "", "parts": "accum=x4"})
    names = [names_of(words, swept_keys(batch), [], named).point for words in batch]
    assert names == ["baseline-resnet", "parts-resnet", "baseline-gpt2", "parts-gpt2"]


def test_without_a_list_a_grid_is_as_it_was() -> None:
    batch = [["seed=1"], ["seed=2"]]
    assert with_points(batch, None) == (batch, {})
    assert [names_of(words, swept_keys(batch), [], {}).point for words in batch] == ["seed1", "seed2"]


def test_at_the_loggers_a_point_is_named_by_what_it_changes() -> None:
    batch = [["precision=bf16", f"ckpt={ckpt}", f"seed={seed}"] for ckpt in ("none", "every2") for seed in (0, 1)]
    names = [names_of(words, swept_keys(batch), axes_of(batch), {}) for words in batch]
    assert [name.run for name in names] == [
        "bf16-none-seed0",
        "bf16-none-seed1",
        "bf16-every2-seed0",
        "bf16-every2-seed1",
    ]
    assert names[0].axes == ["ckpt", "seed"]
    listed, named = with_points([["model=resnet"]], POINTS)
    assert [names_of(words, swept_keys(listed), [], named).run for words in listed] == list(POINTS)
    assert axes_of(listed) == ["accum", "ckpt"]


@pytest.mark.parametrize("points", [5, {}, ["accum=x4"], {"a": 1}], ids=str)
def test_what_is_no_list_of_points_is_one_sentence(points: Any) -> None:
    with pytest.raises(BadInput, match=r"hydra\.sweeper\.points=.*must be names, each with the words of a point"):
        with_points([[]], points)


def test_a_call_without_words_names_no_folder() -> None:
    assert list(folders_in([])) == []
