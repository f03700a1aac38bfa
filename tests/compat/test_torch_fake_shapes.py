"""The results of torch's private operators, without values."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import grouped_mm

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

    def run() -> torch.Tensor:
        ends = None if offs is None else torch.empty_like(offs).copy_(offs)
        factors = torch.ones(one, dtype=dtype), torch.ones(shape, dtype=dtype)[..., :10, :].transpose(-2, -1)
        return grouped_mm(*factors, offs=ends)

    real = run()
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = run()
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
