"""Nothing of a rig is left when it is gone: a notebook that assembles one after another needs the memory of one."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from lowvram.core.assemble import assemble
from lowvram.core.hooks import when_accumulated
from lowvram.core.step import step
from tests.laboratory import CPU, KNOBS, PROBLEMS, knobs_of, make_batch, missing_here

# torch's compilers keep modules that they have traced, in caches of the process (torch 2.13).
COMPILED = {("ckpt", "compiler"), *(pair for pair in KNOBS if pair[0] == "compile")} - {("compile", "none")}
ALL = sorted(set(KNOBS) - COMPILED)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("group", "option"), ALL, ids=[f"{group}={option}" for group, option in ALL])
def test_a_rig_that_is_gone_leaves_no_parameter(group: str, option: str) -> None:
    if missing_here((group, option)):
        pytest.skip("needs what this machine lacks")
    problem = PROBLEMS["transformer"]
    rig = assemble(problem, knobs_of(**{group: option}), CPU)
    for _ in range(2):
        step(rig, make_batch(problem.spec, 4))
    parameters = [weakref.ref(parameter) for parameter in rig.model.parameters()]
    del rig
    gc.collect()
    assert not any(parameter() is not None for parameter in parameters)


class Counter:
    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter, self.num_calls = parameter, 0
        when_accumulated(parameter, self.count)

    def count(self, parameter: nn.Parameter) -> None:
        assert parameter is self.parameter
        assert parameter.grad is not None
        self.num_calls += 1


def test_a_hook_is_called_while_its_object_lives() -> None:
    parameter = nn.Parameter(torch.ones(3))
    counter = Counter(parameter)
    for _ in range(2):
        parameter.sum().backward()
    assert counter.num_calls == 2
    gone = weakref.ref(counter)
    del counter
    parameter.sum().backward()
    assert gone() is None
