"""A forward pass on fake tensors leaves nothing behind."""

from __future__ import annotations

from functools import cache, lru_cache, wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowvram.compat.torch_fake import FakeTensor
from lowvram.core.probes.fake_pass import fake_pass
from lowvram.models.hf import HfConfig
from tests.hugging import with_weights
from tests.models.test_hf_widths import trained


@cache
def places(length: int) -> Tensor:
    return torch.arange(length)


@cache
def registry() -> dict[str, int]:
    return {}


def as_transformers_does(function: Any) -> Any:
    cached = lru_cache(maxsize=10)(function)

    @wraps(function)
    def wrapper(*args: Any) -> Any:
        return cached(*args)

    return wrapper


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(8))

    @staticmethod
    @as_transformers_does
    def reversed_places(length: int) -> Tensor:
        return torch.arange(length).flip(0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[places(len(x))] + self.table[self.reversed_places(len(x))]


def test_nothing_that_functions_remember_is_fake_afterwards() -> None:
    model, x = Remembers(), torch.ones(4)
    fake = fake_pass(model, lambda copy, inputs: copy(inputs), x)
    assert isinstance(fake, FakeTensor)
    assert not isinstance(model.table, FakeTensor)
    assert not isinstance(places(4), FakeTensor)
    assert not isinstance(Remembers.reversed_places(4), FakeTensor)
    assert model(x).tolist() == [3.0, 3.0, 3.0, 3.0]


def test_also_after_a_pass_that_fails() -> None:
    def failing(copy: nn.Module, inputs: Tensor) -> None:
        copy(inputs)
        raise RuntimeError("no")

    model = Remembers()
    with pytest.raises(RuntimeError, match="no"):
        fake_pass(model, failing, torch.ones(4))
    assert not isinstance(model(torch.ones(4)), FakeTensor)


def test_what_was_remembered_before_stays() -> None:
    """A function of the user's may keep what must stay one object."""
    kept = registry()
    fake_pass(Remembers(), lambda copy, inputs: copy(inputs), torch.ones(4))
    assert registry() is kept


def test_code_that_is_no_module_of_python_runs_too() -> None:
    kind = type("Loose", (Remembers,), {"__module__": "not.imported"})
    assert isinstance(fake_pass(kind(), lambda copy, inputs: copy(inputs), torch.ones(4)), FakeTensor)


def test_beit_trains() -> None:
    """Its table of relative places is remembered by the size of its windows."""
    config = HfConfig(with_weights("beit"))
    model, _, inputs = trained(config)
    output = config.call(model, inputs())
    assert not isinstance(output, FakeTensor)
    output.sum().backward()


def test_what_a_model_holds_compiled_runs_as_it_was_written() -> None:
    """Compiled, it failed on tensors without memory, and nobody knew the model's blocks."""

    def backend(graph: nn.Module, example: Any) -> Any:
        raise AssertionError("was compiled")

    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.blocks = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.whole = torch.compile(nn.Linear(4, 4), backend=backend)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return torch.compile(torch.sin, backend=backend)(self.whole(self.layer(x)))

    assert fake_pass(Compiled(), lambda copy, inputs: copy(inputs), torch.ones(2, 4)).shape == (2, 4)
