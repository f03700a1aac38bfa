"""Private names of torch's compiler."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest
import torch

from tests.compat.sentences import needed


@needed("torch._dynamo", by="the fork server, so that points start at once,")
def test_the_first_optimizer_imports_the_compiler() -> None:
    from lowvram.compat.torch_compiler import COMPILER_MODULE

    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    assert sys.modules[COMPILER_MODULE] is import_module(COMPILER_MODULE)


@needed("torch._inductor.config.fallback_random", by="compile=… with dropout")
def test_random_numbers_are_those_of_eager_code() -> None:
    from lowvram.compat.torch_compiler import draws_eager_random_numbers, use_eager_random_numbers

    before = draws_eager_random_numbers()
    try:
        assert not before  # else it needn't be said
        use_eager_random_numbers()
        assert draws_eager_random_numbers()
    finally:
        use_eager_random_numbers(before)


@needed("torch._dynamo.config.use_numpy_random_stream", by="compile=… with numpy's random numbers")
def test_numpys_numbers_are_numpys() -> None:
    from torch._dynamo import config

    from lowvram.compat.torch_compiler import use_numpys_generator

    use_numpys_generator()
    assert config.use_numpy_random_stream


@needed("torch._guards.TracingContext", by="ckpt=selective with compile=…")
def test_code_knows_whether_a_graph_is_made_of_it() -> None:
    from lowvram.compat.torch_compiler import is_making_graph

    seen = list[bool]()

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        seen.append(is_making_graph())
        return graph

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert (seen, is_making_graph()) == ([True], False)


@needed("torch._functorch.config.activation_memory_budget", by="ckpt=budget")
def test_the_budget_is_set_and_restored() -> None:
    from lowvram.compat.torch_compiler import activation_budget, activation_budget_restored, set_activation_budget

    assert activation_budget() == 1.0  # everything that the compiler likes
    with activation_budget_restored():
        set_activation_budget(0.25)
        assert activation_budget() == 0.25
    assert activation_budget() == 1.0


@needed("torch._dynamo.utils.calculate_time_spent", by="time.compile_s of a row")
def test_the_time_of_compiling_is_reported() -> None:
    from lowvram.compat.torch_compiler import compile_seconds

    before = compile_seconds()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    after = compile_seconds()
    assert 0 <= before < after < before + 60
    torch.ones(2).add(1)
    assert compile_seconds() == after


@needed("torch.compiler.config", by="compile=…")
def test_limits_of_recompiling_are_public() -> None:
    """They were torch._dynamo.config's alone."""
    names = ("recompile_limit", "fail_on_recompile_limit_hit")
    dynamo = import_module("torch._dynamo.config")
    with torch.compiler.config.patch({"recompile_limit": 3, "fail_on_recompile_limit_hit": True}):  # pyright: ignore
        assert [getattr(dynamo, name) for name in names] == [3, True]
    assert [getattr(dynamo, name) for name in names] == [getattr(torch.compiler.config, name) for name in names]
    assert dynamo.recompile_limit == pytest.approx(8)
