"""Norms over tensors that may be shards."""

from __future__ import annotations

import pytest
import torch

from lowvram.core.shards import is_sharded, local, total_norm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_norm_is_that_of_all_as_one_vector_in_fp32_at_least(dtype: torch.dtype) -> None:
    tensors = [torch.randn(5, 3, dtype=dtype), torch.randn(70_000, dtype=dtype)]
    wanted = torch.cat([tensor.double().flatten() for tensor in tensors]).norm()
    found = total_norm(iter(tensors))
    assert found.dtype is torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=0)


def test_of_nothing_it_is_zero() -> None:
    assert total_norm([]) == 0


def test_a_plain_tensor_is_its_own_shard() -> None:
    tensor = torch.ones(2)
    assert local(tensor) is tensor
    assert not is_sharded(tensor)
