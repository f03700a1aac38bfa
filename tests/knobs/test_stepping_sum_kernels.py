"""Kernels of sums in few bits compute what their formulas do, to the bit: in Triton's interpreter, and on a card."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from lowvram.knobs.stepping.totals import Bf16, Int8, Total
from tests import interpreted
from tests.laboratory import CPU, needs_gpu, needs_real_gpu

Interpreter = Callable[[Total, list[Tensor], int], Total]
CUDA = torch.device("cuda")
NUMELS = [0, 1, 100, 128, 2048, 2049, 5000]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EACH_TOTAL = pytest.mark.parametrize("make", [Bf16, Int8])
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
EACH_NUMEL = pytest.mark.parametrize("numel", NUMELS)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    """`added` in Triton's interpreter."""
    with interpreted.interpreter() as run:
        yield partial(run, added)


def added(total: Total, gradients: list[Tensor], seed: int) -> Total:
    """`total` after additions by kernels, which take a seed and those before it."""
    from lowvram.knobs.stepping import sum_kernels

    for place, values in enumerate(gradients):
        if isinstance(total, Bf16):
            sum_kernels.add_in_bf16(total.sums, values, seed - place)
        else:
            assert isinstance(total, Int8)
            sum_kernels.add_in_int8(total.codes_bk, total.scales_b, values, seed - place)
    return total


def parts_of(numel: int, dtype: torch.dtype) -> list[Tensor]:
    """Gradients of three parts, of very different sizes; a view at an odd address among them."""
    generator = torch.Generator().manual_seed(numel)
    parts = [torch.randn(numel + 1, generator=generator).mul_(10.0**power).to(dtype) for power in (-3, 0, -6)]
    return [parts[0][1:], parts[1][:-1], parts[2][:-1]]


def assert_same_to_the_bit(one: Total, other: Total) -> None:
    assert vars(one).keys() == vars(other).keys()
    for name, tensor in vars(one).items():
        if isinstance(tensor, Tensor):
            torch.testing.assert_close(getattr(other, name).to(CPU), tensor, rtol=0, atol=0, equal_nan=True)


@pytest.mark.emulated  # where there is Triton
@EACH_TOTAL
@EACH_DTYPE
@EACH_NUMEL
def test_a_kernel_computes_the_same_to_the_bit(
    make: type[Bf16 | Int8], dtype: torch.dtype, numel: int, interpreter: Interpreter
) -> None:
    total, gradients, seed = make(numel, CPU), parts_of(numel, dtype), 2**30 - 1
    for place, values in enumerate(gradients):
        total.add(values, seed - place)
    assert_same_to_the_bit(total, interpreter(make(numel, CPU), gradients, seed))


@pytest.mark.emulated
@EACH_TOTAL
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_the_same(make: type[Bf16 | Int8], bad: float, interpreter: Interpreter) -> None:
    values = torch.ones(300)
    values[[3, 200]] = bad
    for gradients in ([values], [values, -values]):  # a sum of both is nan
        total = make(300, CPU)
        for place, each in enumerate(gradients):
            total.add(each, 7 - place)
        assert_same_to_the_bit(total, interpreter(make(300, CPU), gradients, 7))


@needs_gpu[0]
@needs_gpu[1]
@needs_real_gpu
@EACH_TOTAL
@EACH_DTYPE
@EACH_NUMEL
def test_a_card_computes_the_same_to_the_bit(make: type[Bf16 | Int8], dtype: torch.dtype, numel: int) -> None:
    one, other = make(numel, CPU), make(numel, CUDA)
    for seed, values in enumerate(parts_of(numel, dtype)):
        one.add(values, seed)
        other.add(values.to(CUDA) if seed else torch.cat([values[:1], values]).to(CUDA)[1:], seed)
    assert_same_to_the_bit(one, other)


@needs_gpu[0]
@needs_gpu[1]
@EACH_TOTAL
def test_a_card_compiles_a_kernel_once_for_each_kind_of_gradient(make: type[Bf16 | Int8]) -> None:
    from lowvram.knobs.stepping import sum_kernels

    launcher = sum_kernels.add_to_bf16 if make is Bf16 else sum_kernels.add_to_int8
    launcher.compiled.clear()  # other tests have other kinds
    for numel in NUMELS:
        for dtype in DTYPES:
            for values in parts_of(numel, dtype):
                make(numel, CUDA).add(values.to(CUDA), 1)
    assert len(launcher.compiled) == 2 * len(DTYPES)  # and for numbers that 16 divides
