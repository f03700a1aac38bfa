"""The tensors that are a module's own, and others in their place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lowvram.core import host, rounding
from lowvram.core.kind import Kind
from lowvram.core.ledger import ledger
from lowvram.core.values import materialise, own_tensors


def test_a_modules_own_tensors_are_reported_by_all_of_their_names() -> None:
    module = nn.BatchNorm1d(3, affine=False)
    module.other = nn.Linear(1, 1)
    module.weight = module.tied = nn.Parameter(torch.ones(3))
    names = [name for name, _ in own_tensors(module)]
    assert names == ["weight", "tied", "running_mean", "running_var", "num_batches_tracked"]


def test_what_replaces_them_is_what_the_module_computes_with() -> None:
    """An LSTM keeps a list of its parameters beside them."""
    model, inputs = nn.LSTM(2, 3), torch.ones(4, 1, 2)
    for name, tensor in own_tensors(model):
        setattr(model, name, nn.Parameter(torch.zeros_like(tensor)))
    assert not model(inputs)[0].any()


def test_of_narrow_tensors_the_largest_is_filled_before_the_others_have_memory() -> None:
    """Each exists in fp32, too, while it is filled."""

    def fill(name: str, tensor: Tensor) -> None:
        tensor.fill_(float(name[0]))

    with torch.device("meta"):
        layers = [nn.Linear(256, size, bias=False, dtype=torch.bfloat16) for size in (64, 64, 64, 512)]
    model = nn.Sequential(*layers)
    narrow_bytes, largest_numel = sum(layer.weight.nbytes for layer in layers), layers[3].weight.numel()
    with ledger() as peak:
        materialise(model, fill, torch.device("cpu"))
    assert [layer.weight.detach().max().item() for layer in layers] == [0, 1, 2, 3]
    assert peak.peak_bytes == largest_numel * (4 + 2)
    assert peak.peak_bytes < narrow_bytes + largest_numel * 4


def test_a_tied_tensor_is_filled_once_by_its_first_name() -> None:
    with torch.device("meta"):
        small, large = nn.Linear(2, 2), nn.Linear(9, 2)
    large.bias, filled = small.bias, list[str]()
    model = nn.ModuleDict({"small": small, "large": large})
    materialise(model, lambda name, tensor: filled.append(name), torch.device("cpu"))
    assert filled == ["large.weight", "small.bias", "small.weight"]
    assert large.bias is small.bias


def test_what_waits_on_the_host_is_rounded_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has it once, in fp32, and a few rows of what it becomes."""
    monkeypatch.setattr(rounding, "NUMEL_AT_A_TIME", 1000)
    values = torch.arange(6400).view(64, 100) / 7

    def fill(name: str, tensor: Tensor) -> None:
        tensor.copy_(values)

    with torch.device("meta"):
        layer = nn.Linear(100, 64, bias=False, dtype=torch.bfloat16)
    host.assign(layer.weight)
    with ledger() as peak:
        materialise(layer, fill, torch.device("cpu"))
    assert host.holds(layer.weight)
    assert torch.equal(layer.weight.detach(), values.bfloat16())
    assert peak.peak_bytes - 4 * 6400 in range(1, 2 * 2 * 1000)
    assert peak.by_kind_max[Kind.HOST] == 2 * 6400
