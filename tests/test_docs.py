"""docs/knobs.md has a measured row for every option, or says what it takes to measure it."""

from __future__ import annotations

import re

import pytest

from lowvram.config.identity import ROOT
from lowvram.config.registry import all_options, neutral_options

MEASURED = (ROOT / "docs" / "knobs.md").read_text().split("\n## Measured\n")[-1]
OPTIONS = [option for option in all_options() if neutral_options()[option[0]] != option[1]]
MODELS = 2


@pytest.mark.parametrize("option", OPTIONS, ids="=".join)
def test_every_option_has_its_figures(option: tuple[str, str]) -> None:
    name = "=".join(option)
    rows = re.findall(rf"^\| `{name}(?: [^`]+)?` \| .*%", MEASURED, re.MULTILINE)
    elsewhere = re.findall(rf"^- `{name}` needs ", MEASURED, re.MULTILINE)
    assert len(rows) >= MODELS or elsewhere, f"run scripts/benchmarks/bench_knobs.py for {name}"
