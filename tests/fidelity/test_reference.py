"""What a point is measured against: the neutral options, but for what says what is learnt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from omegaconf import OmegaConf

from lowvram.config.registry import all_options, knob_of, neutral_options, node_of, ready_options
from lowvram.config.settings import KNOB_GROUPS, settings
from lowvram.fidelity.reference import reference_of
from lowvram.knobs.adapter import Lora
from lowvram.knobs.optimizer import SGD, AdamW, Moments
from lowvram.knobs.stepping import AfterBackward
from scripts.benchmarks.runs import Runs

Compose = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def compose(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    with Runs(tmp_path_factory.mktemp("runs")) as runs:
        yield lambda *words: runs.settings_of(list(words))


def referred(compose: Compose, *words: str) -> tuple[dict[str, str], dict[str, Any]]:
    """The options of a reference, and its knobs."""
    options = {word.partition("=")[0]: word.partition("=")[2] for word in words if "." not in word}
    reference = reference_of(compose(*words), {**neutral_options(), **options})
    return reference["choices"], settings(reference["config"]).groups


@pytest.fixture(scope="module")
def neutral(compose: Compose) -> dict[str, Any]:
    return compose()


@pytest.mark.parametrize("option", all_options(), ids="=".join)
def test_of_every_option(neutral: dict[str, Any], option: tuple[str, str]) -> None:
    """It can be built, stands for itself, and is neutral but where the option says what is learnt."""
    config = {**neutral, option[0]: OmegaConf.to_container(node_of(*option))}
    reference = reference_of(config, {**neutral_options(), option[0]: option[1]})
    choices, groups = reference["choices"], settings(reference["config"]).groups
    neutral_choices = {**neutral_options(), "accum": "auto"}
    assert {**choices, option[0]: None} == {**neutral_choices, option[0]: None}
    stand_in = knob_of(option).reference() or knob_of((option[0], neutral_choices[option[0]]))
    assert groups[option[0]] == stand_in
    for group in KNOB_GROUPS:
        assert type(groups[group]) is type(knob_of((group, choices[group])))
        again = groups[group].reference()
        assert again is None or again == groups[group]
    assert groups["accum"].parts == 1


@pytest.mark.parametrize("group", neutral_options())
def test_either_all_options_of_a_group_say_what_is_learnt_or_none(group: str) -> None:
    others = [option for option in ready_options(group) if option != neutral_options()[group]]
    silent = [option for option in others if knob_of((group, option)).reference() is None]
    assert silent in ([], others), f"{group}: {silent} need a reference(), as the others have (docs/adding_a_knob.md)"


def test_what_is_learnt_stays(compose: Compose) -> None:
    words = ("optimizer=sgd", "optimizer.lr=0.3", "optimizer.nesterov=true", "stepping=in_backward", "stepping.clip=2")
    _, groups = referred(compose, *words)
    assert groups["optimizer"] == SGD(lr=0.3, nesterov=True)
    assert groups["stepping"] == AfterBackward(clip=2.0)
    _, groups = referred(compose, "adapter=qlora", "adapter.rank=3", "adapter.train=[head]", "stepping=cpu_offload")
    assert groups["adapter"] == Lora(rank=3, train=["head"])
    _, groups = referred(compose, "optimizer=adamw_8bit", "optimizer.beta1=0.5")
    assert groups["optimizer"] == AdamW(beta1=0.5)
    _, groups = referred(compose, "optimizer=adamw_4bit", "optimizer.beta2=0.5", "sharding=fsdp", "sharding.ranks=2")
    assert groups["optimizer"] == AdamW(beta2=0.5)
    assert groups["sharding"].ranks == "auto"


def test_how_moments_wait_is_no_science(compose: Compose) -> None:
    _, groups = referred(compose, "optimizer.moments=bf16")
    assert groups["optimizer"].moments is Moments.fp32


def test_all_else_is_as_it_was(compose: Compose) -> None:
    config = compose("seed=7", "schedule=cosine", "train.batch_size=6", "precision=bf16", "vram=1GiB")
    before, after = settings(config), settings(reference_of(config, neutral_options())["config"])
    assert replace(after, groups=before.groups) == before
    assert {name for name in before.groups if before.groups[name] != after.groups[name]} == {"precision", "accum"}
