"""The root of the configuration: typed, complete, and nothing unknown."""

from __future__ import annotations

import math
from copy import deepcopy
from functools import cache
from itertools import product
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from lowvram.config.defaults import CONF
from lowvram.config.errors import BadInput
from lowvram.config.registry import node_of
from lowvram.config.settings import (
    GROUPS,
    KNOB_GROUPS,
    PARENT_ONLY,
    MeasureSettings,
    RootSettings,
    SnapshotSettings,
    TrainSettings,
    check_name,
    check_root,
    parse_bytes,
    settings,
)
from lowvram.config.training import OnNonfinite
from tests.laboratory import NEUTRAL

VALUES = {
    "vram": None,
    "timeout_s": None,
    "resume": None,
    "name": None,
    "seed": 0,
    "device": "auto",
    "process": "child",
    "callbacks": None,
}
OTHERS = {"model": "transformer", "task": "auto", "data": "synthetic", "loader": "inline", "schedule": "constant"}


@cache
def merged() -> DictConfig:
    root = OmegaConf.load(CONF / "config.yaml")
    assert isinstance(root, DictConfig)
    options = {**NEUTRAL, **OTHERS, "mode": "train", "logger": "none", "launcher": "local", "paths": "default"}
    groups = {group: node_of(group, option) for group, option in options.items()}
    config = OmegaConf.merge({key: root[key] for key in root if key != "defaults"}, groups)
    assert isinstance(config, DictConfig)
    return config


def whole() -> DictConfig:
    """A configuration as Hydra composes it."""
    return deepcopy(merged())


def refusal(config: DictConfig) -> str:
    with pytest.raises(BadInput) as refused:
        check_root(config)
    return str(refused.value)


def test_a_whole_configuration_is_typed_and_built() -> None:
    config = whole()
    found = settings({str(key): value for key, value in config.items()})
    assert found.root == RootSettings(**VALUES)
    assert found.train == TrainSettings(**{**config.train, "on_nonfinite": OnNonfinite.stop})
    assert found.measure == MeasureSettings(**config.measure)
    assert found.snapshot == SnapshotSettings(**config.snapshot)
    assert tuple(found.groups) == GROUPS
    assert found.vram_bytes is None


def test_what_is_removed_is_missed() -> None:
    for key in (*GROUPS, *PARENT_ONLY, "train", "measure", "snapshot", "seed", "vram"):
        config = whole()
        del config[key]
        assert refusal(config).startswith(f"{key}='~': must be kept: a ")


def test_an_unknown_key_is_refused_with_those_that_are_known() -> None:
    config = whole()
    config["epochs"] = 3
    assert refusal(config).startswith("epochs=3: must be removed: the root knows seed, device, vram, ")


def test_a_group_is_never_a_plain_value() -> None:
    values: list[Any] = [None, "x", 3, [1]]
    for group, value in product((*KNOB_GROUPS, "model", "train", "logger"), values):
        config = whole()
        config[group] = value
        assert refusal(config).startswith(f"{group}="), value


def test_a_key_of_a_section_is_typed_and_known() -> None:
    for key, value, sentence in (
        ("steps", "many", "train.steps='many': must be a whole number"),
        (
            "stepz",
            3,
            "train.stepz=3: must be removed: train knows batch_size, steps, epochs, eval_every, log_every, noise_scale,"
            " rehearse, patience, max_hours, on_nonfinite, max_skipped",
        ),
        ("batch_size", "None", "train.batch_size='None': must be null if nothing is meant (YAML's word for it)"),
        ("batch_size", "???", "train.batch_size='???': must be given a value: a whole number"),
    ):
        config = whole()
        OmegaConf.set_struct(config, False)
        config.train[key] = value
        assert refusal(config) == sentence


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: TrainSettings(0, 1, None, None, 1, False, False), "train.batch_size=0: must be at least 1"),
        (lambda: TrainSettings(1, 0, None, None, 1, False, False), "train.steps=0: must be at least 1"),
        (lambda: TrainSettings(1, 1, None, 0, 1, False, False), "train.eval_every=0: must be null or at least 1"),
        (
            lambda: TrainSettings(1, 1, 0.0, None, 1, False, False),
            "train.epochs=0.0: must be null (train.steps counts) or above 0",
        ),
        (lambda: TrainSettings(1, 1, None, None, 0, False, False), "train.log_every=0: must be at least 1"),
        (lambda: MeasureSettings(0, 1, 1.0, False, False, 1, 2), "measure.warmup_steps=0: must be at least 1"),
        (lambda: MeasureSettings(1, 0, 1.0, False, False, 1, 2), "measure.steps=0: must be at least 1"),
        (
            lambda: MeasureSettings(1, 1, 0.0, False, False, 1, 2),
            "measure.max_seconds=0.0: must be more than 0 seconds",
        ),
        (
            lambda: MeasureSettings(1, 1, math.nan, False, False, 1, 2),
            "measure.max_seconds=nan: must be more than 0 seconds",
        ),
        (lambda: MeasureSettings(1, 1, 1.0, False, True, 0, 2), "measure.fidelity_steps=0: must be at least 1"),
        (lambda: MeasureSettings(1, 1, 1.0, False, True, 1, 3), "measure.reruns=3: must be 0, 1 or 2"),
        (lambda: SnapshotSettings(0, 1, None), "snapshot.every_steps=0: must be null"),
        (lambda: SnapshotSettings(1, 0, None), "snapshot.keep=0: must be at least 1"),
        (lambda: SnapshotSettings(1, 1, -1.0), "snapshot.sharded_above_gib=-1.0: must be null"),
        (lambda: SnapshotSettings(1, 1, math.nan), "snapshot.sharded_above_gib=nan: must be null"),
        (lambda: RootSettings(**{**VALUES, "seed": -1}), "seed=-1: must be between 0 and"),
        (lambda: RootSettings(**{**VALUES, "seed": 2**63}), "seed=9223372036854775808: must be between 0 and"),
        (lambda: RootSettings(**{**VALUES, "device": "gpu"}), "device='gpu': must be auto, cpu, cuda or cuda:N"),
        (lambda: RootSettings(**{**VALUES, "device": "cuda:"}), "device='cuda:': must be auto"),
        (lambda: RootSettings(**{**VALUES, "device": "cuda:12345"}), "device='cuda:12345': must be auto"),
        (lambda: RootSettings(**{**VALUES, "device": "cpu\n"}), "device='cpu\\n': must be auto"),
        (lambda: RootSettings(**{**VALUES, "timeout_s": 0.0}), "timeout_s=0.0: must be null or more than 0 seconds"),
        (lambda: RootSettings(**{**VALUES, "timeout_s": math.nan}), "timeout_s=nan: must be null or more than"),
        (lambda: RootSettings(**{**VALUES, "name": "../x"}), "name='../x': must be null or 1 to 100 letters"),
        (lambda: RootSettings(**{**VALUES, "vram": "8"}), "vram='8': must be null or a number above 0 with a unit"),
    ],
    ids=range(25),
)
def test_values_out_of_range_are_named(make: Any, sentence: str) -> None:
    with pytest.raises(BadInput) as refused:
        make()
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize("name", [None, "a", "Run_1.5+x@y-z", "a" * 100])
def test_names_that_a_folder_can_have(name: str | None) -> None:
    check_name(name)


@pytest.mark.parametrize("name", ["", "../../x", "a/b", ".hidden", "-x", "a b", "a=b", "a,b", "~", "a" * 101, "x\n"])
def test_names_that_no_folder_should_have(name: str) -> None:
    with pytest.raises(BadInput, match=r"^name="):
        check_name(name)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (None, None),
        ("8GiB", 8 * 2**30),
        ("600MiB", 600 * 2**20),
        ("8GB", 8 * 10**9),
        ("1.5 KiB", 1536),
        (".5TB", 5 * 10**11),
        ("1TiB", 2**40),
        (" 2MB ", 2_000_000),
        ("3KB", 3000),
    ],
)
def test_bytes_have_a_unit(text: str | None, num_bytes: int | None) -> None:
    assert parse_bytes("vram", text) == num_bytes


@pytest.mark.parametrize(
    "text",
    [
        "8",
        "8G",
        "8 gib",
        "GiB",
        "-8GiB",
        "0GiB",
        "0.0001KB",
        "nanGiB",
        "8GiB!",
        "1e3GiB",
        "",
        "9" * 400 + "GiB",
        "9" * 19 + "GiB",
    ],
    ids=range(13),
)
def test_what_is_no_amount_of_memory_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match=r"^vram=.*such as 8GiB"):
        parse_bytes("vram", text)
