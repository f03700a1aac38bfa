"""Gradients and states that may be this rank's shards of larger tensors (DTensor)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from lowvram.compat.torch_ops import norms


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor; writing into it writes into the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, detached. Of a sharded one the other ranks bring their shards: all must ask."""
    found = on_mesh(tensor.detach())
    return found.full_tensor() if isinstance(found, DTensor) else found


def on_mesh(tensor: Tensor) -> Tensor:
    """A sharded tensor where its ranks can exchange it: host memory doesn't travel between them. Any other: itself."""
    return tensor.to(tensor.device_mesh.device_type) if is_off_mesh(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def is_off_mesh(tensor: Tensor) -> bool:
    """Whether a tensor's shards lie on another device than the one that its ranks talk over."""
    return isinstance(tensor, DTensor) and local(tensor).device.type != tensor.device_mesh.device_type


def placed(whole: Tensor, like: Tensor, device: torch.device | None = None) -> Tensor:
    """`whole` as `like` lies over the ranks: itself, or this rank's shard of it, in memory of its own. Nothing travels:
    every rank brings the same `whole`.

    Args:
        device: where the shard goes; None is where that of `like` is.
    """
    if not isinstance(like, DTensor):
        return whole
    value = torch.empty_like(like, device=device)
    shard = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    local(value).copy_(local(shard))
    return value


def make_contiguous(model: nn.Module) -> None:
    """Lay out parameters as FSDP2 demands (torch 2.13). Values are the same; convolutions over channels_last images
    reorder their weights when they use them."""
    made: dict[Tensor, nn.Parameter] = {}  # tied ones stay tied
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.is_contiguous():
                contiguous = nn.Parameter(parameter.detach().contiguous(), parameter.requires_grad)
                module.register_parameter(name, made.setdefault(parameter, contiguous))


def class_name(module: nn.Module) -> str:
    """Of the class that the model made: FSDP2 gives what it shards a class of its own on top."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule)).__name__


def spread_as(like: Tensor, shard: Tensor) -> Tensor:
    """This rank's `shard`, wherever it lies, as part of a tensor that is spread over the ranks as `like` is."""
    if not isinstance(like, DTensor):
        return shard
    stride = torch.empty(like.shape, device="meta").stride()
    return DTensor.from_local(
        shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=stride
    )


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The Euclidean norm of all tensors as one vector (0-dim, at least fp32), over the shards of all ranks too.

    Waits for nothing but, with shards, the other ranks: all must call it.
    """
    return square_sum(tensors).sqrt()


def square_sum(tensors: Iterable[Tensor]) -> Tensor:
    """The sum of all squares (0-dim, at least fp32), over the shards of all ranks too."""
    squares, tensors = SquareSum(), list(tensors)
    for norm, tensor in zip(norms_of([local(tensor) for tensor in tensors]), tensors, strict=True):
        squares.take(norm, tensor)
    return squares.total()


def norms_of(tensors: list[Tensor]) -> Sequence[Tensor]:
    """The Euclidean norm of each (0-dim, at least fp32). On a card it takes few kernels, however many tensors."""
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
    return norms(tensors, dtype) if tensors else []


def is_sharded(tensor: Tensor) -> bool:
    """Whether other ranks hold the rest of a tensor."""
    return isinstance(tensor, DTensor) and not all(isinstance(place, Replicate) for place in tensor.placements)


@final
class SquareSum:
    """The sum of the squares of tensors that come one after another and need not stay."""

    def __init__(self) -> None:
        self._norms: list[Tensor] = []  # of whole tensors
        self._norms_of_shards: list[Tensor] = []
        self._like: Tensor | None = None  # the first sharded tensor: where its other shards are

    def add(self, values: Tensor, of: Tensor) -> None:
        """Take in `values`: what this rank holds, on the device or on the host, of a tensor that is spread as `of`."""
        norm = torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32))
        self.take(norm.to(local(of).device), of)

    def take(self, norm: Tensor, of: Tensor) -> None:
        """The same of a norm that is known."""
        if is_sharded(of):
            self._like = of if self._like is None else self._like
            self._norms_of_shards.append(norm)
        else:
            self._norms.append(norm)

    def total(self) -> Tensor:
        """0-dim, at least fp32. Waits for nothing but, with shards, the other ranks: all must call it."""
        whole = torch.stack(self._norms).square().sum() if self._norms else None
        if self._like is None:
            return torch.zeros(()) if whole is None else whole
        total = torch.stack(self._norms_of_shards).square().sum()
        dist.all_reduce(total, group=self._like.device_mesh.get_group())  # pyright: ignore[reportAttributeAccessIssue]
        return total if whole is None else total + whole
