"""Private names of torch's autocast."""

from __future__ import annotations

import torch

from tests.compat.sentences import needed


@needed("torch.autocast_increment_nesting", by="a score of the user's own that leaves autocast on")
def test_autocast_ends_with_the_code_that_left_it_on() -> None:
    from lowvram.compat.torch_autocast import nesting, same_autocast

    weight = torch.ones(2, 2, requires_grad=True)
    for around in (False, True):
        with torch.autocast("cpu", enabled=around):
            depth = nesting()
            with same_autocast():
                torch.autocast("cpu", torch.float16).__enter__()
                torch.set_autocast_cache_enabled(not around)
                torch.matmul(weight, weight)
            assert torch.is_autocast_enabled("cpu") is around
            assert torch.get_autocast_dtype("cpu") is torch.bfloat16
            assert torch.is_autocast_cache_enabled()
            assert nesting() == depth
    assert (weight @ weight).dtype is torch.float32
