"""Kernels of codes compute what their formulas do, to the bit: in Triton's interpreter, and on a card."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from lowvram.knobs.activations.codes import empty_codes, from_codes, read_codes, to_codes, write_codes
from tests import interpreted
from tests.laboratory import CPU, needs_gpu, needs_real_gpu

Results = tuple[Tensor, Tensor, Tensor]  # codes, bounds, and the numbers read back
Interpreter = Callable[[Tensor, int, int], Results]
CUDA = torch.device("cuda")
NUMELS = [0, 1, 63, 64, 2048, 2049, 5000]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EACH_BITS = pytest.mark.parametrize("bits", [8, 4, 2])
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    """`by_kernels` in Triton's interpreter."""
    with interpreted.interpreter() as run:
        yield partial(run, by_kernels)


def by_kernels(values: Tensor, bits: int, seed: int) -> Results:
    from lowvram.knobs.activations import code_kernels

    codes, bounds = empty_codes(len(values), bits, CPU)
    code_kernels.write(codes, bounds, values, bits, seed)
    found = torch.empty_like(values)
    code_kernels.read(found, codes, bounds, bits)
    return codes, bounds, found


def by_formulas(values: Tensor, bits: int, seed: int) -> Results:
    codes, bounds = empty_codes(len(values), bits, values.device)
    if len(values):
        to_codes(codes, bounds, values, bits, seed)
    found = torch.empty_like(values)
    if len(values):
        from_codes(found, codes, bounds, bits)
    return codes, bounds, found


def activations(numel: int, dtype: torch.dtype) -> list[Tensor]:
    """As linear layers, ReLU and norms leave them; one at an odd address."""
    generator = torch.Generator().manual_seed(numel)
    drawn = torch.randn(numel + 1, generator=generator)
    kinds = [drawn, drawn.relu() * 1e-3, drawn + 100, drawn.abs() * 1e-6, torch.zeros(numel + 1)]
    return [kinds[0].to(dtype)[1:], *(each.to(dtype)[:-1] for each in kinds[1:])]


def assert_same_to_the_bit(one: Results, other: Results) -> None:
    for each, wanted in zip(one, other, strict=True):
        torch.testing.assert_close(each.to(CPU), wanted.to(CPU), rtol=0, atol=0, equal_nan=True)


@pytest.mark.emulated  # where there is Triton
@EACH_BITS
@EACH_DTYPE
@pytest.mark.parametrize("numel", NUMELS)
def test_kernels_compute_the_same_to_the_bit(
    bits: int, dtype: torch.dtype, numel: int, interpreter: Interpreter
) -> None:
    for number, values in enumerate(activations(numel, dtype)):
        seed = 2**30 - 1 - number
        assert_same_to_the_bit(interpreter(values, bits, seed), by_formulas(values, bits, seed))


@pytest.mark.emulated
@EACH_BITS
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_so(bits: int, bad: float, interpreter: Interpreter) -> None:
    values = torch.linspace(-1, 1, 300)
    values[[3, 200]] = bad
    (codes, bounds, found), wanted = interpreter(values, bits, 7), by_formulas(values, bits, 7)
    assert torch.equal(found.isfinite(), wanted[2].isfinite())
    clean = [1, 2, 4]  # the blocks without such a number
    assert_same_to_the_bit(
        (codes[clean], bounds[clean], found[64:192]), (wanted[0][clean], wanted[1][clean], wanted[2][64:192])
    )


@needs_gpu[0]
@needs_gpu[1]
@needs_real_gpu
@EACH_BITS
@EACH_DTYPE
@pytest.mark.parametrize("numel", NUMELS[1:])
def test_a_card_computes_the_same_to_the_bit(bits: int, dtype: torch.dtype, numel: int) -> None:
    for seed, values in enumerate(activations(numel, dtype)):
        on_card = torch.cat([values[:1], values]).to(CUDA)[1:] if seed == 0 else values.to(CUDA)
        codes, bounds = empty_codes(numel, bits, CUDA)
        write_codes(codes, bounds, on_card, bits, seed)
        found = torch.empty(numel, dtype=dtype, device=CUDA)
        read_codes(found, codes, bounds, bits)
        assert_same_to_the_bit((codes, bounds, found), by_formulas(values, bits, seed))


@needs_gpu[0]
@needs_gpu[1]
def test_a_card_takes_no_memory_beside_the_codes() -> None:
    values = torch.ones(2**20, device=CUDA)
    codes, bounds = empty_codes(len(values), 8, CUDA)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    write_codes(codes, bounds, values, 8, 1)
    read_codes(values, codes, bounds, 8)
    assert torch.cuda.max_memory_allocated() == before
