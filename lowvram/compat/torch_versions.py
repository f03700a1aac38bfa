"""Private names of torch's counts of in-place changes."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def version(tensor: Tensor) -> int:
    """How often a tensor, or one that shares its memory as a view, was changed in place. Of a sharded one, this rank's
    shard.

    torch.Tensor._version, since before 1.0; autograd tells by it that a tensor that it kept was changed. Replaced by a
    public name, if torch makes one.
    """
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor)._version
