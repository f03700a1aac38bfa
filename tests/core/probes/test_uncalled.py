"""Layers whose weights are read, and that are never called."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowvram
from lowvram.config.errors import Incompatible
from lowvram.core.probes.compilable import CompileObstacles
from lowvram.core.probes.uncalled import Uncalled
from tests import restless
from tests.core.probes.structures import structure_of

WIDTH = restless.WIDTH


class Reading(restless.Mlp):
    """Computes with one weight, calls the layer of another, and has a third for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(F.linear(x, self.a.weight.to(x.dtype), self.a.bias).tanh())


class Regularised(restless.Mlp):
    """Calls a layer, and reads its weight, too."""

    def between(self, x: Tensor) -> Tensor:
        return x * self.a.weight.norm()


class Back(restless.Mlp):
    """Calls a layer, and multiplies by its weight again, in a hook of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.b.register_forward_pre_hook(lambda _, given: (given[0] @ self.a.weight.t(),))


class Shared(restless.Mlp):
    """Two layers with one weight, both called."""

    def __init__(self) -> None:
        super().__init__()
        self.b.weight = self.a.weight


def found(model: nn.Module) -> frozenset[str]:
    return Uncalled().find(structure_of(model, torch.randn(2, WIDTH)))


def test_only_what_is_read_otherwise_than_by_a_call() -> None:
    assert found(restless.Net(Reading, 2)) == {"blocks.0.a", "blocks.1.a"}
    assert found(restless.Net(Regularised, 1)) == {"blocks.0.a"}
    assert found(restless.Net(Back, 1)) == {"blocks.0.a"}
    assert found(restless.Net(Shared, 1)) == frozenset()
    assert found(restless.Net(restless.AttentionDropout, 1)) == {"blocks.0.attention.out_proj"}


class Untriable(Reading):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[x.sum(-1).argsort().numpy()]


def test_a_model_that_cannot_be_tried_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        model = restless.Net(Untriable, 1)
        assert found(model) == frozenset()
        assert CompileObstacles(False, False).find(structure_of(model, torch.randn(2, WIDTH))) == (None, None)
    first, second = capsys.readouterr().out.splitlines()
    assert "nobody knows whether it calls each layer; an adapter or qat has no effect on" in first
    assert "nobody knows whether its forward pass draws, or changes what it holds" in second


def test_an_adapter_there_is_refused_and_so_is_rounding() -> None:
    x = torch.randn(4, WIDTH)
    for option in ("qat=int8", "qat=int4 qat.group=2"):
        with pytest.raises(Incompatible, match=r"no effect on blocks\.0\.a: the model computes"):
            lowvram.assemble(lowvram.task(restless.Net(Reading), x), option, "cpu")
    for words, is_refused in (("", True), (" adapter.targets=[b]", False)):
        task = lowvram.task(restless.Net(Reading), x)
        if is_refused:
            with pytest.raises(Incompatible, match=r"no effect on blocks\.0\.a: the model computes"):
                lowvram.assemble(task, f"adapter=lora{words}", "cpu")
        else:
            lowvram.assemble(task, f"adapter=lora{words}", "cpu")
