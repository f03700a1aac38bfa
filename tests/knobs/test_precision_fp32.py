"""How CUDA multiplies fp32 numbers: what is set can be read by everyone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from lowvram.knobs.precision.fp32 import CUDNN, MATRICES, NEWER, allowed_in, tf32_restored, use_tf32, uses_tf32


@pytest.fixture(autouse=True)
def afterwards() -> Iterator[None]:
    use_tf32(False)
    yield
    use_tf32(False)


@pytest.mark.parametrize("is_used", [False, True])
def test_other_code_can_read_what_is_set(is_used: bool) -> None:
    use_tf32(is_used)
    assert MATRICES.allow_tf32 == CUDNN.allow_tf32 == is_used
    assert torch.get_float32_matmul_precision() == ("high" if is_used else "highest")
    assert [each.fp32_precision == "tf32" for each in NEWER] == [is_used] * 3
    assert [uses_tf32(is_convolution) for is_convolution in (False, True)] == [is_used] * 2
    with torch.backends.cudnn.flags(enabled=False):
        torch.export.export(nn.Conv2d(1, 1, 1), (torch.zeros(1, 1, 2, 2),))
    assert CUDNN.allow_tf32 == is_used


@pytest.mark.parametrize("is_used", [False, True])
def test_all_of_it_is_restored(is_used: bool) -> None:
    use_tf32(is_used)
    before = [each.fp32_precision for each in NEWER]
    with tf32_restored():
        use_tf32(not is_used)
    assert [each.fp32_precision for each in NEWER] == before
    assert MATRICES.allow_tf32 == CUDNN.allow_tf32 == is_used


def test_what_the_program_has_mixed_is_restored_too() -> None:
    CUDNN.conv.fp32_precision, MATRICES.fp32_precision = "tf32", "tf32"
    assert allowed_in(CUDNN) is None
    with tf32_restored():
        use_tf32(False)
    assert CUDNN.conv.fp32_precision == MATRICES.fp32_precision == "tf32"
