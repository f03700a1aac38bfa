"""The results of torch's private operators, without values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm
from torch.utils._python_dispatch import TorchDispatchMode

from lowvram.compat.torch_fake import FakeTensorMode
from tests.compat.sentences import needed

GROUPS, ROWS, INNER, COLUMNS = 3, 8, 8, 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((ROWS, INNER), (GROUPS, INNER, COLUMNS)),
        ((ROWS, INNER), (INNER, COLUMNS)),
        ((GROUPS, ROWS, INNER), (INNER, COLUMNS)),
        ((GROUPS, ROWS, INNER), (GROUPS, INNER, COLUMNS)),
    ],
)
@needed("torch.ops.aten._grouped_mm", by="plans of mixtures of experts")
def test_grouped_products_have_the_shapes_of_real_ones(
    one: tuple[int, ...], other: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Rows that aren't a multiple of 16 bytes are padded."""
    offs = None if len(one) == len(other) == 3 else torch.tensor([2, 5, 8], dtype=torch.int32)
    shape = (*other[:-2], COLUMNS, other[-2])

    def run() -> Tensor:
        ends = None if offs is None else torch.empty_like(offs).copy_(offs)
        factors = torch.ones(one, dtype=dtype), torch.ones(shape, dtype=dtype)[..., :10, :].transpose(-2, -1)
        return grouped_mm(*factors, offs=ends)

    real = run()
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = run()
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@needed("torch.ops.aten.mkldnn_rnn_layer", by="plans of recurrent models")
def test_recurrent_layer_keeps_the_workspace_of_a_real_one(dtype: torch.dtype) -> None:
    def run() -> list[Tensor]:
        results: list[Tensor] = []

        class Seeing(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                out = func(*args, **(kwargs or {}))
                results.extend(out if func is torch.ops.aten.mkldnn_rnn_layer.default else [])
                return out

        layer = nn.LSTM(12, 64, dtype=dtype)
        with Seeing():
            layer(torch.zeros(50, 6, 12, dtype=dtype))
        return results

    real = run()
    if dtype is torch.bfloat16 and not real:
        pytest.skip("for bf16 torch uses this operator on processors alone that multiply in bf16")
    with FakeTensorMode():
        fake = run()
    assert len(real) == len(fake) == 4
    for one, other in zip(real[:3], fake[:3], strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    assert fake[3].nbytes == pytest.approx(real[3].nbytes, rel=0.02)


@needed("torch.ops.aten.mkldnn_rnn_layer", by="plans of recurrent models")
def test_the_workspace_grows_evenly_with_the_steps() -> None:
    from lowvram.compat.torch_fake_shapes import real_workspace_bytes, recurrent_layer, workspace_bytes

    sizes = 20, 6, 12, 64, torch.float32
    assert workspace_bytes(*sizes) == pytest.approx(real_workspace_bytes(*sizes), rel=0.02)
    weights = [torch.zeros(shape) for shape in ((256, 12), (256, 64), (256,), (256,), (6, 64), (6, 64))]
    *_, workspace = recurrent_layer(torch.zeros(20, 6, 12), *weights)
    assert workspace.nbytes == workspace_bytes(*sizes)
