"""What is known of a model: each question is asked once, and a knob with a new one brings all that it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import pytest
import torch
from torch import nn

import lowvram
from lowvram.config.errors import BadInput, Incompatible
from lowvram.core.assemble import assemble, check_conflicts
from lowvram.core.fact import Fact, ModelFact
from lowvram.core.knob import Knob, Stage
from lowvram.core.probes.blocks import FoundBlocks
from lowvram.core.probes.calls import uses_of
from lowvram.core.probes.stated import TAIL
from lowvram.core.rig import Rig, Task
from lowvram.core.structure import Blocks, Probe, Structure, unless
from lowvram.models.external import ExternalConfig
from lowvram.tasks import Auto, External
from tests.laboratory import CPU, PROBLEMS, TOKENS, knobs_of

# A knob with a question that nobody has asked before: its class, its probe, and the fact that it needs. (Its YAML is
# like any other: test_new_option.py.)

ASKED: list[nn.Module] = []  # the models that the trial has run


@final
@dataclass(frozen=True)
class Widths(Probe[Mapping[str, int]]):
    """How many numbers each block returns for a sample, where that is at least `least`."""

    least: int = 0

    def find(self, known: Structure) -> Mapping[str, int]:
        ASKED.append(known.model)
        uses = uses_of(known.model, known.call, known.short_example(2), known.get(Blocks()).blocks)
        widths = {name: use.output[0].numel() for name, use in uses.items()}
        return {name: width for name, width in widths.items() if width >= self.least}


WIDE_BLOCKS = ModelFact("blocks return many numbers", unless(lambda known: known.get(Widths(8)), "leave scale=none"))


@final
@dataclass(frozen=True)
class Doubled(Knob):
    """Doubles what wide blocks return."""

    stage = Stage.CHECKPOINT

    def needs(self) -> frozenset[Fact | ModelFact]:
        return frozenset({WIDE_BLOCKS})

    def apply(self, rig: Rig) -> Rig:
        for block in rig.structure.modules(rig.structure.get(Widths(8))):
            block.register_forward_hook(lambda module, inputs, output: output.mul(2))
        return rig


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def hooked(rig: Rig) -> int:
    return sum(bool(module._forward_hooks) for module in rig.model.modules())


@pytest.mark.parametrize("problem", ["transformer", "resnet"])
def test_a_new_question_needs_a_probe_and_nothing_else(problem: str) -> None:
    task, knobs = PROBLEMS[problem], {**knobs_of(), "scale=double": Doubled()}
    assert hooked(assemble(task, knobs, CPU)) == hooked(assemble(task, knobs_of(), CPU)) + 3


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_an_adapted_model_answers_it_too(adapter: str) -> None:
    task, knobs = PROBLEMS["transformer"], {**knobs_of(adapter=adapter), "scale=double": Doubled()}
    assert assemble(task, knobs, CPU).structure.get(Widths(8)).keys() == {f"blocks.{number}" for number in range(3)}


def test_a_model_without_it_is_refused_in_a_sentence() -> None:
    task = lowvram.task(nn.Sequential(Narrow(), Narrow()), torch.randn(2, 3), blocks="Narrow")
    with pytest.raises(Incompatible, match="scale=double needs that blocks return many numbers: leave scale=none"):
        assemble(task, {**knobs_of(), "scale=double": Doubled()}, CPU)


def test_each_question_is_asked_once_for_all_builds_of_a_model() -> None:
    ASKED.clear()
    task = Auto().pose(PROBLEMS["transformer"].model, replace(TOKENS, num_classes=17))
    again = Auto().pose(PROBLEMS["transformer"].model, replace(TOKENS, num_classes=17))
    for each in (task, task, again):
        assert each.structure(each.make_model()).get(Widths(8))
    assert len(ASKED) == 1
    assert task.structure(task.make_model()).get(Widths()) == again.structure(again.make_model()).get(Widths())
    assert len(ASKED) == 2
    other = Auto().pose(PROBLEMS["transformer"].model, replace(TOKENS, num_classes=18))
    assert other.structure(other.make_model()).get(Widths(8))
    assert len(ASKED) == 3


def test_a_module_that_its_user_may_have_changed_is_asked_again() -> None:
    ASKED.clear()
    task = lowvram.task(nn.Sequential(Narrow(), Narrow()), torch.randn(2, 3), blocks="Narrow")
    for num_asked in (1, 2):
        known = task.structure(task.make_model())
        assert known.get(Widths()) == {"0": 3, "1": 3}
        assert known.get(Widths())
        assert len(ASKED) == num_asked


def test_what_is_stated_is_not_tried() -> None:
    def refuse(model: nn.Module, inputs: Any) -> Any:
        raise AssertionError

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    stated = FoundBlocks(("0",), "1", True, ("1.weight",))
    known = Structure(model, refuse, refuse, refuse, {Blocks(): lambda known: stated})  # pyright: ignore[reportArgumentType]
    assert known.blocks == [model[0]]
    assert known.head is model[1]
    assert known.last_weights == {model[1].weight}
    assert known.get(TAIL) is None


def test_a_class_of_blocks_that_is_not_there_is_told_whatever_is_asked() -> None:
    task: Task = Auto().pose(ExternalConfig("torch.nn.Tanh", blocks="Tanhh"), TOKENS)
    with pytest.raises(BadInput, match=r"model\.blocks='Tanhh'"):
        check_conflicts(task.structure(task.make_model()), {}, {})


def test_blocks_that_are_not_in_the_model_are_refused() -> None:
    """They would be treated beside the model that trains."""
    task = External("tests.yours.BlocksElsewhere").pose(PROBLEMS["transformer"].model, TOKENS)
    with pytest.raises(BadInput, match=r"task\.target='blocks\(model\)': must be modules of the model: Linear is none"):
        assemble(task, knobs_of(), CPU)
