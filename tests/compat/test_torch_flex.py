"""Private names of torch's FlexAttention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from tests.compat.sentences import needed
from tests.laboratory import compiler_as_before, missing_here

LENGTH, WINDOW = 24, 5


def sees(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (query >= key) & (query - key < WINDOW)


@needed("torch.ops.higher_order.flex_attention", by="model.local_kernel=flex")
def test_both_passes_are_those_of_masked_attention() -> None:
    from lowvram.compat.torch_flex import flex_backward, flex_forward

    q, k, v = (torch.rand(2, 2, LENGTH, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask: Any = create_block_mask(sees, 1, 1, LENGTH, LENGTH, device="cpu")
    places, none = torch.arange(LENGTH), torch.zeros(())
    is_seen = sees(none, none, places[:, None], places)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_seen)
    weights = torch.rand_like(expected)
    with torch.no_grad():
        output, sums = flex_forward(q, k, v, mask)
        gradients = flex_backward(weights, q, k, v, output, sums, mask)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, (q, k, v), weights))


@pytest.mark.slow
@pytest.mark.skipif(missing_here(("compile", "blocks")), reason="no C++ compiler")
@needed("torch._inductor.compile", by="model.local_kernel=flex")
def test_a_function_becomes_kernels_without_a_look_at_values() -> None:
    from lowvram.compat.torch_flex import compiled

    with compiler_as_before(), torch.no_grad():
        kernel = compiled(lambda x, y: (x.sin() * y, x + 1), [torch.full((3, 4), torch.nan), torch.rand(4)])
        x, y = torch.rand(3, 4), torch.rand(4)
        torch.testing.assert_close(list(kernel(x, y)), [x.sin() * y, x + 1])
