"""Tensors of a model that share memory, although they are several tensors: after `decoder.weight.data =
encoder.weight.data.t()` an update of one changes the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from lowvram.compat.torch_modes import without_dispatch_modes


def sharing(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Those of the tensors that have at least one number in common with another, in groups of those in one memory.
    Parts of one memory that don't overlap, as the weights of an LSTM on a card, aren't such."""
    return [overlapping for group in in_one_memory(tensors) if (overlapping := overlaps(group))]


def in_one_memory(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Those of the tensors that lie in the memory of another, in groups, whether they overlap or not."""
    of_memory: dict[int, tuple[torch.UntypedStorage, list[Tensor]]] = {}
    for tensor in dict.fromkeys(tensors):
        if not isinstance(tensor, DTensor) and not is_lazy(tensor) and tensor.numel():
            storage = tensor.untyped_storage()  # kept, so that its id isn't used again
            of_memory.setdefault(id(storage), (storage, []))[1].append(tensor)
    return [group for _, group in of_memory.values() if len(group) > 1]


def overlaps(group: list[Tensor]) -> list[Tensor]:
    """Of tensors in one memory those that have a number in common with another."""
    with without_dispatch_modes():  # in a plan tensors have no values
        found, still_open = set[Tensor](), list[Tensor]()
        for tensor in sorted(group, key=first_byte):
            still_open = [each for each in still_open if first_byte(tensor) < end_byte(each)]
            for each in still_open:
                if not found.issuperset((each, tensor)) and have_common(each, tensor):
                    found |= {each, tensor}
            still_open.append(tensor)
    return [tensor for tensor in group if tensor in found]


def have_common(earlier: Tensor, later: Tensor) -> bool:
    """Whether two tensors in one memory have a byte in common. `later` starts between the first and the last byte of
    `earlier`."""
    first = first_byte(earlier)
    if first_byte(later) == first or is_without_gaps(earlier):
        return True
    unit_bytes = min(earlier.itemsize, later.itemsize)
    num_units = (max(end_byte(earlier), end_byte(later)) - first) // unit_bytes
    marks = torch.zeros(num_units, dtype=torch.bool, device="cpu")

    def laid_out(tensor: Tensor) -> Tensor:
        """The marks of a tensor's numbers."""
        units = tensor.itemsize // unit_bytes
        sizes, strides = zip(*((size, stride * units) for size, stride in steps_of(tensor)), (units, 1), strict=True)
        return marks.as_strided(sizes, strides, (first_byte(tensor) - first) // unit_bytes)

    laid_out(earlier).fill_(True)
    return bool(laid_out(later).any())


def is_without_gaps(tensor: Tensor) -> bool:
    """Whether a tensor's numbers, in whatever order, fill the memory between its first and its last."""
    next_place = 1
    for size, stride in sorted(steps_of(tensor), key=lambda step: step[1]):
        if stride > next_place:
            return False
        next_place += (size - 1) * stride
    return True


def steps_of(tensor: Tensor) -> list[tuple[int, int]]:
    """Size and stride, in numbers, of the dimensions along which a tensor moves in its memory."""
    steps = [(int(size), int(stride)) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return [(size, stride) for size, stride in steps if size > 1 and stride > 0]


def first_byte(tensor: Tensor) -> int:
    """The place of a tensor's first byte in its memory."""
    return int(tensor.storage_offset()) * tensor.itemsize


def end_byte(tensor: Tensor) -> int:
    """The place behind a tensor's last byte in its memory."""
    return (last_place(tensor) + 1) * tensor.itemsize


def last_place(tensor: Tensor) -> int:
    """The place of the last of a tensor's numbers in its memory, in numbers."""
    return int(tensor.storage_offset()) + sum((size - 1) * stride for size, stride in steps_of(tensor))


def names_sharing(model: nn.Module) -> list[list[str]]:
    """The names of parameters and buffers that share memory, the first name of each."""
    named = [*model.named_parameters(), *model.named_buffers()]
    names = {tensor: name for name, tensor in reversed(named)}
    return [[names[tensor] for tensor in group] for group in sharing(names)]


def laid_out_as(tensors: Iterable[Tensor], empty: Callable[[Tensor], Tensor]) -> dict[Tensor, Tensor]:
    """New tensors with the shapes, strides and dtypes of others, for each of which one is made; those that share memory
    share it again.

    Args:
        empty: makes one, given such a tensor.
    """
    distinct = list(dict.fromkeys(tensors))
    shared = [group for group in sharing(distinct) if len({tensor.dtype for tensor in group}) == 1]
    new = dict[Tensor, Tensor]()
    for group in shared:
        num_numbers = max(map(last_place, group)) + 1
        memory = empty(torch.empty(num_numbers, dtype=group[0].dtype, device="meta"))
        for tensor in group:
            new[tensor] = memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return {tensor: as_parameter_like(tensor, new[tensor] if tensor in new else empty(tensor)) for tensor in distinct}


def as_parameter_like(old: Tensor, new: Tensor) -> Tensor:
    """`new`, as a parameter if `old` is one."""
    return nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
