"""docs/compatibility.md says what the facts say, and the script that made it sees what is wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from lowvram.config.registry import all_options, neutral_options
from lowvram.core.device import absent_facts
from lowvram.core.fact import Fact
from scripts.benchmarks.runs import Runs
from scripts.pages import compatibility
from scripts.pages.compatibility import (
    FLOOR,
    FLOOR_OF_BF16,
    FLOOR_OF_CODES,
    PAGE,
    Grid,
    Tried,
    counted,
    fault,
    floor,
    is_its_own,
    options_lines,
    options_on,
    tolerance,
)
from scripts.pages.pairs import all_pairs, label, why_not

ABSENT = {fact: why for fact, why in absent_facts(torch.device("cpu")).items() if fact is not Fact.C_COMPILER}


THERE = options_on(PAGE.read_text())  # any other option is not yet tried


def test_the_page_tells_of_options_that_exist() -> None:
    assert len(THERE) > 40
    assert set(THERE) <= set(all_options())
    assert list(options_lines(THERE)) == list(options_lines([one for one in all_options() if one in THERE]))
    two = [("ckpt", "none"), ("ckpt", "every1")]
    assert options_on("\n".join(options_lines(two))) == two


def test_the_page_names_the_pairs_that_facts_refuse_and_no_other() -> None:
    here = [option for option in THERE if not why_not([option], ABSENT)]
    refused = {label(pair) for pair in all_pairs(here) if why_not(pair, ABSENT)}
    assert set(re.findall(r"^\| `(\S+=\S+ \S+=\S+)` \|", PAGE.read_text(), re.MULTILINE)) == refused


def test_pairs_of_new_options_are_added_to_those_that_the_page_has() -> None:
    before = counted(7, is_added=True).removesuffix(" and later 7")
    assert f"CPU. {before} configurations" in PAGE.read_text()
    assert counted(7, is_added=False) == "7"


def test_the_page_counts_its_options() -> None:
    (number,) = re.findall(r"^\| all \| (\d+) \|", PAGE.read_text(), re.MULTILINE)
    assert int(number) == len(all_pairs(THERE)), "run scripts/pages/compatibility.py"


def test_the_page_has_no_failures() -> None:
    tried, trained = re.findall(r"^\| (?:tried|trained [^|]*) \| (\d+) \|", PAGE.read_text(), re.MULTILINE)
    assert tried == trained
    assert "## Failed" not in PAGE.read_text()


NEUTRAL = frozenset(neutral_options().items())
BF16 = frozenset({**neutral_options(), "precision": "bf16"}.items())


@pytest.mark.parametrize(
    ("row", "history", "found"),
    [
        (NEUTRAL, [2.0, 1.0], None),
        (NEUTRAL, [2.0, 1.0 + FLOOR / 2], None),
        (NEUTRAL, [2.0, 1.001], "off by 1.0e-03 in step 1, allowed 1.0e-04"),
        (BF16, [2.0, 1.001], None),
        (BF16, [2.0, 1.5], "off by 5.0e-01 in step 1, allowed 2.0e-02"),
    ],
)
def test_what_lies_outside_the_bands_is_a_fault(row: frozenset, history: list[float], found: str | None) -> None:
    reference = Tried(NEUTRAL, "transformer", "ok", None, [2.0, 1.0], 0.0)
    assert fault(Tried(row, "transformer", "ok", None, history, 0.0), reference) == found


def test_in_each_step_as_much_error_is_added() -> None:
    reference = Tried(NEUTRAL, "transformer", "ok", None, [2.0, 1.0, 2.0, 1.0], 0.0)
    assert fault(Tried(BF16, "transformer", "ok", None, [2.0, 1.0, 2.0, 1.039], 0.0), reference) is None
    assert fault(Tried(BF16, "transformer", "ok", None, [2.0, 1.039, 2.0, 1.0], 0.0), reference)
    assert fault(Tried(NEUTRAL, "transformer", "ok", None, [2.0, 1.0, 2.0, float("nan")], 0.0), reference)


def test_a_point_that_did_not_end_well_is_a_fault() -> None:
    reference = Tried(NEUTRAL, "transformer", "ok", None, [2.0], 0.0)
    assert fault(Tried(NEUTRAL, "transformer", "error", "why", [], 0.0), reference) == "error: why"


def test_an_optimizer_is_compared_with_itself() -> None:
    assert tolerance(frozenset({**neutral_options(), "optimizer": "sgd"}.items())) == FLOOR
    assert tolerance(frozenset({**neutral_options(), "optimizer": "adamw_8bit"}.items())) == FLOOR_OF_CODES


def test_ranks_may_round_the_parts_of_muons_matrices_otherwise() -> None:
    def of(**options: str) -> float:
        return floor(frozenset({**neutral_options(), **options}.items()))

    assert of(optimizer="muon", sharding="tensor") == of(optimizer="muon", sharding="fsdp") == FLOOR_OF_BF16
    assert of(optimizer="muon_companded", sharding="tensor") == FLOOR_OF_CODES
    others = {"optimizer": "muon"}, {"optimizer": "muon", "sharding": "ddp"}, {"sharding": "tensor"}
    alone = {"optimizer": "muon", "offload": "parameters"}
    assert {of(**options) for options in (*others, alone)} == {FLOOR}


def test_what_decides_what_is_learnt_is_compared_with_itself() -> None:
    own = {option for option in all_options() if is_its_own(option)}
    assert {("sparsity", "set"), ("stepping", "zeroth_order"), ("optimizer", "sgd"), ("adapter", "lora")} <= own
    assert not own & {("precision", "bf16"), ("qat", "int8"), ("stepping", "in_backward"), ("accum", "auto")}


def test_of_estimated_gradients_losses_alone_are_compared() -> None:
    row = frozenset({**neutral_options(), "stepping": "zeroth_order"}.items())
    reference = Tried(row, "transformer", "ok", None, [2.0, 1.0, 1.9], 0.0)
    assert fault(Tried(row, "transformer", "ok", None, [2.0, 9.0, 1.9], 0.0), reference) is None
    assert fault(Tried(row, "transformer", "ok", None, [2.0, 1.0, 1.8], 0.0), reference)


def test_what_was_tried_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []

    def try_out(runs: Runs, row: frozenset[tuple[str, str]], model: str) -> Tried:
        tried.append((row, model))
        return Tried(row, model, "ok", None, [2.0, 1.5 if row == BF16 else 1.0], 0.5)

    monkeypatch.setattr(compatibility, "try_out", try_out)
    runs, file = cast(Runs, None), tmp_path / "tried.jsonl"
    first = Grid(runs, file).check(BF16, "resnet")
    assert first == "off by 5.0e-01 in step 1, allowed 2.0e-02"
    assert tried == [(BF16, "resnet"), (NEUTRAL, "resnet")]
    assert Grid(runs, file).check(BF16, "resnet") == first
    assert len(tried) == 2
    assert Grid(runs, file).check(NEUTRAL, "transformer") is None
    assert len(tried) == 3
