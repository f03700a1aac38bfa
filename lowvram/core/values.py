"""Gives a model's tensors memory and their initial values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowvram.compat.torch_fake import is_fake
from lowvram.core import host
from lowvram.core.references import aliases, replace_tensors
from lowvram.core.rounding import rows_of
from lowvram.core.shards import local, placed, with_notes
from lowvram.core.shared_memory import laid_out_as, sharing

# Called with the dotted name of a parameter or buffer and its tensor; writes the initial value into it. A fill that
# needs temporary memory has a method `without_values`, with the same arguments, that only allocates it, for plans.
Fill = Callable[[str, Tensor], None]


def own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """A module's own parameters and buffers, under each of their names; `setattr(module, name, …)` replaces one."""
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    return [*parameters, *module.named_buffers(recurse=False, remove_duplicate=False)]


@torch.no_grad()
def materialise(model: nn.Module, fill: Fill, device: torch.device) -> None:
    """Give every meta tensor of the model memory on the device and its initial value. Tied tensors stay tied, and
    strides are kept. The order doesn't change the values, as each tensor is filled by its first name."""
    names = first_names(model)
    real = filled_together(model, names, fill, device)
    for module in largest_first(model):
        for name, tensor in own_tensors(module):
            if not tensor.is_meta:
                continue
            if tensor not in real:
                real[tensor] = initial(names[tensor], tensor, fill, device)
            setattr(module, name, real[tensor])
    replace_tensors(model, real)
    here = [tensor for tensor in [*model.parameters(), *model.buffers()] if not host.holds(tensor)]
    if any(tensor.device.type != device.type for tensor in here):
        groups = sharing([*here, *aliases(model)])
        moved = laid_out_as((tensor for group in groups for tensor in group), partial(empty_on, device))
        held = {tensor: tensor.data for tensor in [*model.parameters(), *model.buffers()] if host.holds(tensor)}
        model.to(device)  # a task's model may have come with memory, on another device
        for tensor, memory in held.items():
            tensor.data = memory
        for tensor, memory in moved.items():  # torch has parted those that shared memory
            tensor.data = memory.copy_(tensor).detach()


def filled_together(
    model: nn.Module, names: Mapping[Tensor, str], fill: Fill, device: torch.device
) -> dict[Tensor, Tensor]:
    """The meta tensors of a model that share memory, with memory and values; they share it again.

    Args:
        names: of its parameters and buffers.
    """
    groups = sharing(tensor for tensor in [*names, *aliases(model)] if tensor.is_meta)
    real = laid_out_as((tensor for group in groups for tensor in group), partial(empty_on, device))
    for tensor, memory in real.items():
        if tensor in names:
            memory.copy_(initial(names[tensor], tensor, fill, device))
    return real


def empty_on(device: torch.device, tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def first_names(model: nn.Module) -> dict[Tensor, str]:
    """The dotted name of each parameter and buffer; of a tied one, the first."""
    names: dict[Tensor, str] = {}
    for prefix, module in model.named_modules():
        for name, tensor in own_tensors(module):
            names.setdefault(tensor, f"{prefix}.{name}" if prefix else name)
    return names


def largest_first(model: nn.Module) -> list[nn.Module]:
    """The model's modules, those of the largest tensors first: while a tensor of 16 bits is filled, it exists in fp32,
    too, and so that of an embedding is gone before the other tensors have memory."""

    def largest_numel(module: nn.Module) -> int:
        return max((tensor.numel() for _, tensor in own_tensors(module)), default=0)

    return sorted(model.modules(), key=largest_numel, reverse=True)


def initial(name: str, tensor: Tensor, fill: Fill, device: torch.device) -> Tensor:
    """The initial value of one parameter or buffer, on the device. Of a sharded tensor every rank draws all values and
    keeps its shard, so that they don't depend on the number of ranks."""
    dtype = at_least_fp32(tensor.dtype)
    whole = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)
    if is_fake(whole):  # in a plan there is no memory to write to
        fill = getattr(fill, "without_values", fill_nothing)
    fill(name, whole)
    room = host.room_of(tensor)
    if room is not None and not isinstance(tensor, DTensor):
        return as_it_was(rounded_into(room(tensor), whole), tensor)
    rounded = whole.to(tensor.dtype)
    del whole  # what is in fp32 is free before a sharded tensor is copied
    value = placed(rounded, tensor, device if room is None else host.DEVICE)
    if room is host.pageable:
        value = host.arrived(value)
    elif room is not None:
        there = room(value)
        local(there).copy_(local(value))
        value = there
    return as_it_was(value, tensor)


def as_it_was(value: Tensor, tensor: Tensor) -> Tensor:
    """The value with what the tensor without memory was besides: a parameter, and notes about it."""
    value = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
    return with_notes(value, tensor)


@torch.no_grad()
def rounded_into(value: Tensor, whole: Tensor) -> Tensor:
    """The value, which is in host memory, filled with numbers of the device, some rows at a time: the device has room
    for little more than these numbers."""
    for rows, exact in zip(rows_of(value), rows_of(whole), strict=True):
        rows.copy_(exact.to(value.dtype))
    return value


def fill_nothing(name: str, tensor: Tensor) -> None:
    """The fill for fake tensors: writes nothing."""


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which initial values are drawn: fp32 for weights of fewer bits, which are then rounded, so that all
    formats start with the same numbers."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
