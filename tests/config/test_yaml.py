"""Every YAML in conf/: it builds, says all that its dataclass has, and explains it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from lowvram.config.defaults import CONF, default_options
from lowvram.config.identity import register_resolvers
from lowvram.config.parent_settings import LoggerSettings
from lowvram.config.registry import node_of
from lowvram.config.schema import build, find_target
from lowvram.config.settings import (
    GROUPS,
    KNOB_GROUPS,
    PARENT_ONLY,
    ROOT_KEYS,
    SECTIONS,
    RootSettings,
    check_root,
    settings,
)
from tests.hugging import tiny

OPTIONS = [(group, path.stem) for group in (*GROUPS, "launcher") for path in sorted((CONF / group).glob("*.yaml"))]
GIVEN = {  # what the user has to say of an option
    ("data", "text"): {"path": "somewhere"},
    ("data", "imagefolder"): {"path": "somewhere"},
    ("data", "hub"): {"name": "somewhere"},
    ("data", "chat"): {"name": "somewhere"},
    ("data", "pairs"): {"name": "somewhere", "text": "asked", "target": "said"},
    ("data", "external"): {"target": "tests.yours.curve"},
    ("task", "external"): {"target": "tests.yours.Regression"},
    ("task", "distill"): {"teacher": "somewhere"},
    ("optimizer", "external"): {"target": "torch.optim.NAdam"},
    ("model", "external"): {"target": "torch.nn.Linear"},
    ("model", "hf"): {"name": tiny("gpt2")},
}
PRESETS = [f"{folder}={path.stem}" for folder in ("experiment", "sweep", "debug") for path in (CONF / folder).glob("*")]
BASELINE = {
    "model": "transformer",
    "task": "auto",
    "data": "auto",
    "loader": "inline",
    "allocator": "default",
    "adapter": "none",
    "precision": "fp32",
    "ckpt": "none",
    "compile": "none",
    "sharding": "none",
    "optimizer": "adamw",
    "stepping": "after_backward",
    "ema": "none",
    "logits": "full",
    "offload": "none",
    "accum": "none",
    "schedule": "constant",
    "mode": "train",
    "logger": "wandb",
    "launcher": "local",
    "paths": "default",
}

option = pytest.mark.parametrize(("group", "name"), OPTIONS, ids=[f"{group}={name}" for group, name in OPTIONS])


def built(group: str, name: str) -> Any:
    node = OmegaConf.merge(node_of(group, name), GIVEN.get((group, name), {}))
    assert isinstance(node, DictConfig)
    return build(node, group)


@option
def test_an_option_builds_a_frozen_value_from_every_field(group: str, name: str) -> None:
    value = built(group, name)
    assert set(node_of(group, name)) - {"_target_"} == {field.name for field in dataclasses.fields(value)}
    assert value.__dataclass_params__.frozen


@option
def test_an_option_and_each_of_its_fields_has_a_comment(group: str, name: str) -> None:
    first, *lines = (CONF / group / f"{name}.yaml").read_text().splitlines()
    assert re.fullmatch(r"# \w.+", first)
    fields = [line for line in lines if not line.startswith(("#", "_target_:"))]
    assert all(re.fullmatch(r"\w+: .*\S +# \S.*", line) for line in fields), fields
    assert {line.partition(":")[0] for line in fields} == set(node_of(group, name)) - {"_target_"}


def test_the_defaults_of_every_class_are_an_option() -> None:
    """Others of the same class are presets."""
    values: dict[type, list[tuple[str, str]]] = {}
    for group, name in OPTIONS:
        values.setdefault(type(built(group, name)), []).append((group, name))
    for cls, names in values.items():
        assert any(built(*each) == cls(**GIVEN.get(each, {})) for each in names), cls


@option
def test_a_knob_lives_in_the_module_of_its_group(group: str, name: str) -> None:
    if group in KNOB_GROUPS:
        target = node_of(group, name)["_target_"]
        is_shipped = target.startswith(f"lowvram.compress.{group}.")
        assert is_shipped or target.rpartition(".")[0] == f"lowvram.knobs.{group}"
        assert find_target(group, target).group_name == (group if is_shipped else None)


def test_every_group_has_its_neutral_option() -> None:
    chosen = default_options()
    assert {group: chosen[group] for group in BASELINE} == BASELINE
    assert set(BASELINE) <= {*GROUPS, *PARENT_ONLY}
    assert all((CONF / group / f"{chosen[group]}.yaml").exists() for group in (*GROUPS, *PARENT_ONLY))


def test_every_folder_is_a_group_and_every_group_a_folder() -> None:
    folders = {path.name for path in CONF.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == {*GROUPS, *PARENT_ONLY, "hydra", "local", "experiment", "sweep", "debug", "data_sheets"}


# The root


def root_node() -> DictConfig:
    node = OmegaConf.load(CONF / "config.yaml")
    assert isinstance(node, DictConfig)
    return node


def test_the_root_has_the_keys_of_its_dataclasses() -> None:
    root = root_node()
    assert set(root) - {"defaults"} == {*ROOT_KEYS, "logger"}
    assert {field.name for field in dataclasses.fields(RootSettings)} | set(SECTIONS) == set(ROOT_KEYS)
    for name, cls in {**SECTIONS, "logger": LoggerSettings}.items():
        assert list(root[name]) == [field.name for field in dataclasses.fields(cls)]


def test_every_line_of_the_root_that_holds_a_value_has_a_comment() -> None:
    lines = (CONF / "config.yaml").read_text().splitlines()
    values = [line for line in lines if re.match(r"\s*-? ?\w+: \S", line) and "- hydra:" not in line]
    assert len(values) > 30
    assert all("  # " in line for line in values), [line for line in values if "  # " not in line]


# Whole configurations


@pytest.fixture
def hydra_conf() -> Iterator[None]:
    register_resolvers()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


PRESETS_OF_LLMS = [path.stem for path in (CONF / "experiment").glob("*lora_*.yaml")]
PRESETS_OF_LLMS += [path.stem for kind in ("full", "long") for path in (CONF / "experiment").glob(f"{kind}_*.yaml")]
SAID = {  # what the user of a preset has to say, or says where there is no network
    "experiment=gpt2_scratch_8gb": ["data.path=somewhere"],
    "experiment=resnet50_8gb": ["data.path=somewhere"],
    "experiment=finetune_bert_8gb": [f"model.name={tiny('bert')}"],
    **{f"experiment={name}": ["data.path=somewhere", f"model.name={tiny('llama')}"] for name in PRESETS_OF_LLMS},
}


@pytest.mark.parametrize("word", [None, *PRESETS])
def test_whole_configurations_compose_and_build(hydra_conf: None, word: str | None) -> None:
    config = compose("config", [word, *SAID.get(word, [])] if word else [])
    check_root(config)
    values = OmegaConf.to_container(config, resolve=True)
    assert isinstance(values, dict)
    assert set(settings({str(key): value for key, value in values.items()}).groups) == set(GROUPS)
