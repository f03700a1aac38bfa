"""Private names of torchao."""

from __future__ import annotations

from typing import Any

import torch

from tests.compat.sentences import needed


@needed("torchao.optim.AdamW8bit._new_buffer", by="optimizer=adamw_8bit and adamw_4bit")
def test_moments_are_codes_unless_they_are_small() -> None:
    from lowvram.compat.torchao import new_moment
    from lowvram.core.quiet import quiet

    with quiet():
        from torchao.optim import AdamW4bit, AdamW8bit
    for kind, num_bits in ((AdamW8bit, 8), (AdamW4bit, 4)):
        large, small = torch.zeros(64, 128), torch.zeros(3)
        optimizer = kind([torch.nn.Parameter(large)])
        for signed in (True, False):
            moment = new_moment(optimizer, large, signed)
            assert moment.shape == large.shape
            assert moment.codes.numel() * 8 == large.numel() * num_bits  # pyright: ignore
            assert type(new_moment(optimizer, small, signed)) is torch.Tensor
        levels = [new_moment(optimizer, large, signed).qmap.min().item() for signed in (True, False)]  # pyright: ignore
        assert levels[0] < 0 <= levels[1]


@needed("OptimState8bit.__tensor_unflatten__", by="optimizer=adamw_8bit and adamw_4bit of large weights")
def test_a_part_of_a_moment_shares_its_memory() -> None:
    from lowvram.compat.torchao import new_moment, part_of_moment
    from lowvram.core.quiet import quiet

    with quiet():
        from torchao.optim import AdamW4bit, AdamW8bit
    for kind in (AdamW8bit, AdamW4bit):
        large = torch.randn(64, 128)
        whole: Any = new_moment(kind([torch.nn.Parameter(large)]), large, True)
        whole.copy_(large)
        part = part_of_moment(whole, 512, 2048)
        assert torch.equal(part.dequantize(), whole.dequantize().view(-1)[512:2048])
        part.copy_(torch.ones(1536))
        assert torch.equal(whole.dequantize().view(-1)[512:2048], torch.ones(1536))


@needed("torchao.prototype.safetensors' flatten_tensor_state_dict and its inverse", by="export.format=int8 and int4")
def test_a_state_of_few_bits_comes_back_from_plain_tensors() -> None:
    from lowvram.compat.torchao import flattened, unflattened
    from lowvram.compress.formats.weights import int8_weights, quantize
    from lowvram.core.quiet import quiet

    with quiet():
        layer = torch.nn.Linear(8, 3)
        quantize(model := torch.nn.Sequential(layer), int8_weights(), [layer])
        model.register_buffer("own", torch.arange(3.0))
        state = {name: tensor.data for name, tensor in model.state_dict(keep_vars=True).items()}
        tensors, about = flattened(state)
        again = unflattened(tensors, about)
    assert all(type(tensor) is torch.Tensor for tensor in tensors.values())
    assert {name for name in tensors if name.endswith("_qdata")} == {"0._weight_qdata"}
    assert type(again["0.weight"]) is type(state["0.weight"]) is not torch.Tensor
    assert torch.equal(again["0.weight"].dequantize(), state["0.weight"].dequantize())
    assert torch.equal(again["own"], state["own"])


@needed("attributes qdata and scale of torchao.quantization's weights of few bits", by="export.format=int8 and int4")
def test_a_weight_of_few_bits_takes_other_codes_and_scales() -> None:
    from lowvram.compat.torchao import set_codes
    from lowvram.compress.formats.weights import int4, int8, int8_dynamic, quantize
    from lowvram.core.quiet import quiet

    codes = torch.arange(-7, 1).expand(3, 8).contiguous().to(torch.int8)
    with quiet():
        for written, num_scales in ((int8(), 3), (int8_dynamic(), 3), (int4(4), 6)):
            layer = torch.nn.Linear(8, 3)
            quantize(torch.nn.Sequential(layer), written.config(), [layer])
            set_codes(layer.weight, codes, scale := torch.rand(num_scales))
            weight: Any = layer.weight
            assert torch.equal(weight.dequantize(), codes * scale.view(3, -1).repeat_interleave(24 // num_scales, 1))
