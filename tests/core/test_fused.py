"""Operators made of others: what they write, and what a trace and a ledger see of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowvram.compat.torch_autograd import version_of
from lowvram.compat.torch_fake import FakeTensorMode
from lowvram.compat.torch_modes import TorchDispatchMode
from lowvram.core.fused import fused
from tests.laboratory import needs_gpu


def add_double(sums: Tensor, values: Tensor, times: int) -> None:
    sums.add_(values * 2 * times)


def in_halves(sums: Tensor, values: Tensor, times: int) -> None:
    half = len(sums) // 2
    add_double(sums[:half], values[:half], times)
    add_double(sums[half:], values[half:], times)


operator = fused("add_double_for_a_test(Tensor(a!) sums, Tensor values, int times) -> ()", add_double, in_halves)


def test_two_operators_of_one_name_are_told() -> None:
    with pytest.raises(ValueError, match="two operators called add_double_for_a_test"):
        fused("add_double_for_a_test(Tensor(a!) sums) -> ()", add_double, in_halves)


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # pyright: ignore
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_it_writes_into_its_argument_as_one_operator() -> None:
    sums = torch.ones(5)
    before = version_of(sums)
    values = torch.arange(5.0)
    with Seen() as seen:
        operator(sums, values, 3)
    assert sums.tolist() == [1, 7, 13, 19, 25]
    assert seen.names == ["lowvram::add_double_for_a_test"]
    assert version_of(sums) > before


def test_without_memory_it_does_nothing() -> None:
    with FakeTensorMode():
        operator(torch.ones(5), torch.ones(5), 1)


@needs_gpu[0]
@needs_gpu[1]
def test_a_card_compiles_it_once() -> None:
    """Inside and outside of dispatch modes, with and without gradients."""
    sums, values = torch.ones(5000, device="cuda"), torch.ones(5000, device="cuda")
    with torch.no_grad():
        operator(sums, values, 3)
    with torch.compiler.set_stance("fail_on_recompile"):
        operator(sums, values, 3)
        with Seen():
            operator(sums, values, 3)


@needs_gpu[0]
@needs_gpu[1]
def test_a_kernel_written_by_hand_is_launched_past_the_dispatcher() -> None:
    """But for dispatch modes, which see the operator."""
    launched: list[int] = []

    def launch(sums: Tensor, values: Tensor, times: int) -> None:
        launched.append(times)

    schema = "add_double_by_hand_for_a_test(Tensor(a!) sums, Tensor values, int times) -> ()"
    by_hand = fused(schema, add_double, in_halves, launch)
    sums = torch.ones(5, device="cuda")
    by_hand(sums, sums.clone(), 3)
    with Seen() as seen:
        by_hand(sums, sums.clone(), 4)
    assert launched == [3, 4]
    assert "lowvram::add_double_by_hand_for_a_test" in seen.names
    on_cpu = torch.ones(2)
    by_hand(on_cpu, torch.ones(2), 5)
    assert on_cpu.tolist() == [11, 11]
    assert launched == [3, 4]
