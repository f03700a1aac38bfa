"""Private names of torch's counts of in-place changes."""

from __future__ import annotations

import torch

from tests.compat.sentences import needed


@needed("torch.Tensor._version", by="a snapshot of the last whole step after an error")
def test_changes_in_place_are_counted() -> None:
    from lowvram.compat.torch_versions import version

    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    before = version(weight)
    weight.square().sum().backward()
    assert version(weight) == before
    torch.optim.AdamW([weight], foreach=False).step()
    assert version(weight) > before
