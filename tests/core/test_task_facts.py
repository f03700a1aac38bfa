"""Facts that a task lacks: each is found, and only where it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowvram.config.errors import BadInput
from lowvram.core.assemble import check_conflicts
from lowvram.core.knob import Fact
from lowvram.core.rig import Part, Task
from lowvram.core.task_facts import TASK_FACTS, absent_of, unshardable
from lowvram.core.values import Fill
from lowvram.models.external import ExternalConfig
from lowvram.tasks import Auto
from tests.laboratory import TOKENS


@dataclass(frozen=True)
class Lacking(Task):
    """Knows nothing of its model but, maybe, the blocks."""

    has_blocks: bool

    def make_model(self) -> nn.Module:
        model = nn.Sequential(nn.Dropout(0.5))
        model.temperature = nn.Parameter(torch.tensor(1.0 + 1.0j))  # a single number, and complex
        model.shared = nn.Parameter(torch.ones(2, 3))
        model.transposed = nn.Parameter(model.shared.detach().t())
        return model

    def values(self, model: nn.Module, seed: int) -> Fill:
        raise NotImplementedError

    def criterion(self, outputs: Any, part: Part) -> Tensor:
        raise NotImplementedError

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(model.children()) if self.has_blocks else []

    def has_plain_blocks(self, model: nn.Module) -> bool:
        return False

    def has_few_shapes(self) -> bool:
        return False

    def has_soft_targets(self) -> bool:
        return True

    def written(self, model: nn.Module) -> tuple[str | None, str | None]:
        return "shared", "shared"


def test_the_facts_of_a_task_are_those_that_it_may_lack() -> None:
    """A fact that `TASK_FACTS` misses would be asked of no task in plans; one too many asks models in vain."""
    lacking = [absent_of(task, task.make_model()) for task in (Lacking(True), Lacking(False))]
    assert set().union(*lacking) == TASK_FACTS


class Counted(nn.Linear):
    """A block that counts how often its parameters are listed."""

    times = 0

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        Counted.times += 1
        return super().parameters(recurse)


class Stacked(Lacking):
    def make_model(self) -> nn.Sequential:
        return nn.Sequential(*(Counted(2, 2) for _ in range(50)))


def test_the_weights_of_blocks_are_counted_once_and_only_where_asked() -> None:
    task, Counted.times = Stacked(True), 0
    model = task.make_model()
    assert Fact.SHARDABLE not in absent_of(task, model, TASK_FACTS - {Fact.SHARDABLE})
    assert Counted.times == 0
    assert absent_of(task, model, frozenset({Fact.SHARDABLE})) == {}
    assert Counted.times == 50
    model[7].weight = model[8].weight
    assert "7.weight is in 2 blocks" in absent_of(task, model, frozenset({Fact.SHARDABLE}))[Fact.SHARDABLE]


def test_a_weight_of_a_block_that_a_layer_outside_has_too_cannot_be_sharded() -> None:
    """FSDP2 has a traceback for it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    blocks = [model[1], model[2]]
    assert unshardable(model, blocks) is None
    model[0].weight = model[2].weight
    assert "0.weight is in a block, and 0, outside of the blocks, has it, too" in str(unshardable(model, blocks))
    model.weight = model[1].weight
    assert "the model itself, outside of the blocks" in str(unshardable(model, blocks[:1]))


def test_a_class_of_blocks_that_is_not_there_is_told_whatever_is_asked() -> None:
    task = Auto().pose(ExternalConfig("torch.nn.Tanh", blocks="Tanhh"), TOKENS)
    with pytest.raises(BadInput, match=r"model\.blocks='Tanhh'"):
        check_conflicts(task, task.make_model(), {}, {})
