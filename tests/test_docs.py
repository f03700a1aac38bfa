"""Pages of docs/: what they name is there. docs/knobs.md: what was measured has its figures for every model."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
from omegaconf import DictConfig, OmegaConf
from transformers import TrainingArguments

from lowvram.config.defaults import CONF, ROOT
from lowvram.config.registry import all_options, neutral_options, node_of, options_of

MEASURED = (ROOT / "docs" / "knobs.md").read_text().split("\n## Measured\n")[-1]
OPTIONS = ["=".join(option) for option in all_options() if neutral_options()[option[0]] != option[1]]
MODELS = 2


def measured_rows(page: str, name: str) -> list[str]:
    """Of models that can't have it the reason stands there instead of figures."""
    return re.findall(rf"^\| `{name}(?: [^`]+)?` \| (?:.*%|incompatible: )", page, re.MULTILINE)


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


COMING = (ROOT / "docs" / "coming_from.md").read_text()
HERE = "".join(line.split(" | ", 1)[1] for line in COMING.splitlines() if line.startswith("| `"))


def test_what_stands_for_other_trainers_options_is_there() -> None:
    root = OmegaConf.load(CONF / "config.yaml")
    named = re.findall(r"(?<![\w.-])([a-z_]+)=([a-z_0-9]+)", HERE)
    assert len(set(named)) > 40
    groups = {path.name for path in CONF.iterdir() if path.is_dir()}
    assert not [f"{group}={option}" for group, option in named if group in groups and option not in options_of(group)]
    keys = re.findall(r"`([a-z]+)\.(\w+)(?:=[^`]*)?`", HERE)
    assert len(set(keys)) > 30
    known = {(group, key) for group in groups for option in options_of(group) for key in node_of(group, option)}
    known |= {(str(name), str(key)) for name, node in root.items() if isinstance(node, DictConfig) for key in node}
    assert not {key for key in keys if key[0] not in ("lowvram", "result")} - known


def test_every_option_of_other_trainers_has_its_row() -> None:
    tables = COMING.split("\n## ")[1:]
    assert [table.split(":")[0] for table in tables] == ["Hugging Face", "Lightning", "torchtune", "Axolotl"]
    options = [re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)[1:] for table in tables]
    assert sum(len(of_trainer) for of_trainer in options) > 100
    assert len(options[0]) > 40
    assert set(re.findall(r"`(\w+)`", " ".join(options[0]))) - OF_OTHERS <= {
        each.name for each in fields(TrainingArguments)
    }


OF_OTHERS = {  # of Trainer, TRL and peft
    *("compute_metrics", "callbacks", "packing", "assistant_only_loss", "peft_config", "use_rslora"),
}
