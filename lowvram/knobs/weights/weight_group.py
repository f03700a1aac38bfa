"""Weights that stay in host memory, and visit the device together in a place of their own, or one that they share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from lowvram.compat.torch_autograd import set_versions, version_of
from lowvram.compat.torch_modules import own_buffers, own_parameters
from lowvram.core import host
from lowvram.core.copies import register_copy
from lowvram.core.hooks import when_accumulated
from lowvram.core.layers import PackedWeight
from lowvram.core.ledger import is_dense
from lowvram.core.links import Link, nothing
from lowvram.knobs.weights.returns import Returns

ALIGNED_BYTES = 256  # as CUDA's allocator places tensors, for kernels that read several numbers at once


@final
class Slot:
    """Memory on the device.

    Attributes:
        holder: whose weights are there, or arrive.
        wait: has work that is queued from now on wait until they have arrived.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory.detach()
        self.holder: WeightGroup | None = None
        self.wait: Callable[[], None] = nothing


@final
class WeightGroup:
    """The weights of some modules, those that are packed into buffers, too.

    While these compute they have parameters of the device in the weights' places, whose memory is the slot. What is in
    it changes without autograd's noticing; so each of them tells by its version what it holds: another number for other
    values, and an odd one until they have arrived. Then torch refuses to read a parameter of the device in a
    backward pass if it doesn't hold what it held in the forward pass.

    Args:
        modules: each of which has its weights for itself.
        others: parameters of theirs that don't visit.
    """

    def __init__(
        self, modules: Sequence[nn.Module], others: Collection[nn.Parameter], link: Link, returns: Returns
    ) -> None:
        packed = [own_buffers(module) for module in modules if isinstance(module, PackedWeight)]
        self.places = [
            (own, name)
            for own in [*map(own_parameters, modules), *packed]
            for name, weight in own.items()
            if weight is not None and weight not in others
        ]
        self.link, self.returns = link, returns
        self.slot: Slot | None = None
        self.copies: dict[Tensor, Tensor] = {}  # those of the device, once the weights have memory
        self.homes: dict[Tensor, Tensor] = {}  # the inverse
        self.rooms: list[tuple[Tensor, Tensor]] = []  # each weight with its part of the slot
        self.seen: list[int] = []  # the weights' versions when they last left for the device
        self.version, self.depth = 0, 0
        self.swapped: list[tuple[dict[str, Any], str, Tensor]] = []

    @property
    def weights(self) -> list[Tensor]:
        """Each once, in order."""
        return list(dict.fromkeys(own[name] for own, name in self.places))

    @property
    def num_bytes(self) -> int:
        """Of the slot that they need."""
        return sum(rounded_up(weight.nbytes) for weight in self.weights)

    def keep_on_host(self, room: host.Room) -> None:
        """Have the weights get their memory there. Those that have some are moved."""
        for weight in self.weights:
            host.assign(weight, room)
            if not weight.is_meta:
                weight.data = room(weight).copy_(weight.detach())

    def make_copies(self, slot: Slot) -> None:
        """Make the parameters of the device."""
        begin = 0
        for weight in self.weights:
            size = weight.numel() * weight.itemsize
            room = slot.memory[begin : begin + size].view(weight.dtype)
            stride = weight.stride() if is_dense(weight) else torch.empty(weight.shape, device="meta").stride()
            room = room.as_strided(weight.shape, stride)
            copy = room.data
            if isinstance(weight, nn.Parameter):
                copy = register_copy(nn.Parameter(copy, weight.is_floating_point()), weight)
            if isinstance(copy, nn.Parameter) and copy.requires_grad:  # it may rest now, and train later
                when_accumulated(copy, self.give_back)
            self.copies[weight], self.homes[copy] = copy, weight
            self.rooms.append((weight, room))
            begin += rounded_up(size)

    def give_back(self, copy: nn.Parameter) -> None:
        """Send a gradient to its weight; called when autograd has computed it."""
        (gradient, copy.grad), weight = (copy.grad, None), self.homes[copy]
        if gradient is not None and isinstance(weight, nn.Parameter):
            self.returns.take(weight, gradient)

    def forget(self) -> None:
        """Somebody may have written to the weights in host memory."""
        self.seen = []

    def prefetch(self) -> None:
        """Begin to copy the weights, unless the slot has them already."""
        slot = self.slot
        assert slot is not None
        if not self.copies:
            self.make_copies(slot)
        versions = [version_of(weight) for weight, _ in self.rooms]
        is_new = versions != self.seen
        if slot.holder is self and not is_new:
            return
        if slot.holder is not None and slot.holder is not self:
            slot.holder.invalidate()
        if is_new:
            self.version, self.seen = self.version + 2, versions
        with torch.no_grad():
            for weight, room in self.rooms:
                slot.wait = self.link.send(room, weight.detach())
        slot.holder = self
        self.invalidate()

    def invalidate(self) -> None:
        """Have nobody read the weights on the device until they arrive."""
        set_versions(self.homes, self.version + 1)

    def arrive(self) -> None:
        """Have work that is queued from now on find the weights on the device."""
        self.prefetch()
        assert self.slot is not None
        wait, self.slot.wait = self.slot.wait, nothing
        wait()
        set_versions(self.homes, self.version)

    def enter(self) -> None:
        """Put the parameters of the device into the modules."""
        self.arrive()
        self.depth += 1
        if self.depth > 1:
            return
        for own, name in self.places:
            weight = own[name]
            copy = self.copies.get(weight)  # none where somebody has put something else there
            if copy is not None:
                if copy.requires_grad != weight.requires_grad:
                    copy.requires_grad_(weight.requires_grad)
                self.swapped.append((own, name, weight))
                own[name] = copy

    def leave(self) -> None:
        """Put the weights back."""
        self.depth = max(0, self.depth - 1)  # hooks after a forward pass run, too, where those before it have failed
        if self.depth == 0:
            for own, name, weight in self.swapped:
                own[name] = weight
            self.swapped = []


def rounded_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
