"""Weights in 4 bits: the published levels, and layers that compute with them."""

from __future__ import annotations

from statistics import NormalDist

import pytest
import torch
from torch import Tensor, nn

from lowvram.compat.torch_fake import FakeTensorMode
from lowvram.knobs.adapter.nf4 import BLOCK, LEVELS, Convolution, FourBit, Linear, Product, pack, pairs, unpack


def four_bit(layer: nn.Module, product: Product) -> FourBit:
    """The layer, its values packed."""
    narrow = FourBit(layer, product)
    packed = pack(layer.get_parameter("weight").detach())
    narrow.codes, narrow.scales, narrow.pairs = packed.codes, packed.scales, pairs()
    return narrow


def test_levels_are_quantiles_of_a_normal_distribution() -> None:
    """Eight from zero up and nine from zero down, evenly spaced in probability, scaled to 1 (QLoRA's equation 4)."""
    offset = (1 - 1 / 30 + 1 - 1 / 32) / 2  # what bitsandbytes takes instead of 1
    quantile = NormalDist().inv_cdf
    up = [quantile(0.5 + (offset - 0.5) * step / 8) for step in range(1, 9)]
    down = [-quantile(0.5 + (offset - 0.5) * step / 7) for step in range(1, 8)]
    levels = [level / quantile(offset) for level in sorted([*down, 0.0, *up])]
    assert levels == pytest.approx(LEVELS, abs=2e-4)


@pytest.mark.parametrize("shape", [(64, 32), (3, 5), (8, 4, 3, 3), (1,)])
def test_each_weight_becomes_the_nearest_level_of_its_block(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    packed = pack(weight)
    assert packed.codes.nbytes == -(-weight.numel() // BLOCK) * BLOCK // 2
    found = unpack(packed, pairs(), weight.shape, torch.float32)
    scales = packed.scales.repeat_interleave(BLOCK)[: weight.numel()].view(shape)
    best = (torch.tensor(LEVELS) * scales[..., None] - weight[..., None]).abs().amin(-1)
    assert torch.allclose((found - weight).abs(), best, atol=1e-7)


def test_zeros_stay_zeros_and_extremes_stay_exact() -> None:
    weight = torch.zeros(2, BLOCK)
    weight[1, 3] = -2.5
    assert unpack(pack(weight), pairs(), weight.shape, torch.float32).equal(weight)


def test_a_weight_of_many_blocks_is_packed_in_pieces() -> None:
    weight = torch.randn(2**14 + 3, BLOCK)
    whole, last = pack(weight), pack(weight[-5:])
    assert whole.codes[-5 * BLOCK // 2 :].equal(last.codes)
    assert whole.scales[-5:].equal(last.scales)


def test_codes_are_those_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(64, 192)
    codes, state = functional.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
    packed = pack(weight)
    assert packed.codes.equal(codes.flatten())
    assert packed.scales.equal(state.absmax)
    found = unpack(packed, pairs(), weight.shape, torch.float32)
    assert found.equal(functional.dequantize_4bit(codes, state))


LAYERS = {
    "linear": (lambda: nn.Linear(48, 20), Linear(), (3, 5, 48)),
    "without bias": (lambda: nn.Linear(48, 20, bias=False), Linear(), (7, 48)),
    "convolution": (lambda: nn.Conv2d(4, 6, 3, 2, 1), Convolution((2, 2), (1, 1), (1, 1), 1), (2, 4, 9, 9)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_as_with_the_weight_that_its_codes_mean(name: str, dtype: torch.dtype) -> None:
    make, product, shape = LAYERS[name]
    layer = make()
    narrow = four_bit(layer, product)
    layer.weight.data.copy_(narrow.dequantized())
    layer.to(dtype)
    if narrow.bias is not None:
        narrow.bias = nn.Parameter(narrow.get_parameter("bias").to(dtype))
    (found, found_gradient), (wanted, wanted_gradient) = (run(each, shape, dtype) for each in (narrow, layer))
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    assert torch.allclose(found, wanted, rtol=tolerance, atol=tolerance)
    assert torch.allclose(found_gradient, wanted_gradient, rtol=tolerance, atol=tolerance)


def run(layer: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Outputs, and the gradient of inputs."""
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    outputs = layer(inputs)
    outputs.square().sum().backward()
    assert inputs.grad is not None
    return outputs, inputs.grad


def test_a_transposed_layer_is_one_of_transformers() -> None:
    weight, bias = torch.randn(48, 20), torch.randn(20)
    layer = nn.Linear(48, 20)
    layer.weight, layer.bias = nn.Parameter(weight), nn.Parameter(bias)
    narrow, inputs = four_bit(layer, Linear(transposed=True)), torch.randn(5, 48, requires_grad=True)
    outputs = narrow(inputs)
    assert torch.allclose(outputs, inputs @ narrow.dequantized() + bias, atol=1e-5)
    outputs.sum().backward()
    assert inputs.grad is not None
    assert torch.allclose(inputs.grad, narrow.dequantized().sum(1).expand(5, 48), atol=1e-5)


def test_under_autocast_it_multiplies_in_its_format() -> None:
    narrow = four_bit(nn.Linear(64, 64), Linear())
    with torch.autocast("cpu", torch.bfloat16):
        assert narrow(torch.randn(2, 64)).dtype is torch.bfloat16


def test_nothing_wide_is_saved() -> None:
    narrow, saved = four_bit(nn.Linear(256, 256), Linear()), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        narrow(torch.randn(2, 256, requires_grad=True))
    assert sum(tensor.nbytes for tensor in saved) == narrow.codes.nbytes + narrow.scales.nbytes + narrow.pairs.nbytes


def test_it_can_be_planned_and_is_no_state() -> None:
    with FakeTensorMode():
        narrow = FourBit(nn.Linear(64, 64), Linear())
        assert narrow(torch.randn(2, 64)).shape == (2, 64)
    assert set(narrow.state_dict()) == {"bias"}
    assert (narrow.num_weights, narrow.weight.shape) == (64 * 64, (64, 64))
