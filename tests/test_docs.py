"""docs/knobs.md: an option that was measured there has its figures for every model, and is still an option."""

from __future__ import annotations

import re

import pytest

from lowvram.config.defaults import ROOT
from lowvram.config.registry import all_options, neutral_options

MEASURED = (ROOT / "docs" / "knobs.md").read_text().split("\n## Measured\n")[-1]
OPTIONS = ["=".join(option) for option in all_options() if neutral_options()[option[0]] != option[1]]
MODELS = 2


def measured_rows(page: str, name: str) -> list[str]:
    return re.findall(rf"^\| `{name}(?: [^`]+)?` \| .*%", page, re.MULTILINE)


def needs_a_card(page: str, name: str) -> bool:
    return bool(re.search(rf"^- `{name}` needs ", page, re.MULTILINE))


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_has_its_figures(name: str) -> None:
    rows = measured_rows(MEASURED, name)
    if not rows and not needs_a_card(MEASURED, name):
        pytest.skip(f"{name} is not yet measured: scripts/benchmarks/bench_knobs.py")
    assert len(rows) >= MODELS or needs_a_card(MEASURED, name), f"run scripts/benchmarks/bench_knobs.py for {name}"


def test_the_page_says_of_the_others_that_they_are_not_yet_measured() -> None:
    assert "An option without a row is not yet measured." in MEASURED
    named = re.findall(r"^(?:\||-) `(\w+=\w+)(?: [^`]*)?`", MEASURED, re.MULTILINE)
    assert len(set(named)) > 30
    assert set(named) <= set(OPTIONS)
