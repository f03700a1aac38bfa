"""weights=stream: weights wait in host memory, and travel to the device a block ahead of the computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from lowvram.compat.torch_autograd import after_backward, current_node
from lowvram.compat.torch_trees import tree_leaves
from lowvram.config.errors import Incompatible, require
from lowvram.core import host
from lowvram.core.fact import Fact
from lowvram.core.host_file import HostFile, check_folder
from lowvram.core.host_tables import keep_tables_on_host
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob, Neutral, Stage
from lowvram.core.links import link_to
from lowvram.core.misfits import ONCE
from lowvram.core.probes.weights import REAL_WEIGHTS, SEPARATE_MEMORY, SHARDABLE
from lowvram.core.probes.writes import STEADY_WEIGHTS
from lowvram.core.rig import Rig
from lowvram.core.structure import BLOCKS
from lowvram.knobs.weights.returns import Returns
from lowvram.knobs.weights.weight_group import Slot, WeightGroup

NUM_SHARED = 2  # slots: of the block that computes, and of the one that comes next
SLOTS = "lowvram_slots"  # the buffer of the model that they are


@dataclass(frozen=True)
class OnDevice(Neutral):
    """All weights are on the device."""

    stage = Stage.PLACE


@dataclass(frozen=True)
class StreamedWeights(Knob):
    """Weights, gradients and the optimizer's states are in host memory. The device has room for the weights of two
    blocks, and those of the next block arrive while one computes.

    What is outside of the blocks is on the device all the time, and arrives once a step; but of embeddings only those
    rows go there that are looked up, and the last layer's weight is there while that layer computes.

    Args:
        resident: so many blocks, the first ones, are on the device all the time, and arrive once a step. None: a plan
            is to choose their number; where nothing is planned, as in a loop of one's own, it is 0.
        folder: of a file in which weights and states are, instead of in memory; None: none.
    """

    resident: int | None = 0
    pin_memory: bool = True
    folder: str | None = None

    stage = Stage.PLACE
    moves_to_host = True
    misfits: ClassVar[Mapping[str, str]] = {
        **ONCE,
        "Expected all tensors to be on the same device": "modules compute with the weights that they own: choose"
        " weights=device (if that fails alike, it is the model's own code)",
        "modified by an inplace operation": "gradients reach a block through what it returns: choose weights=device (if"
        " that fails alike, it is the model's own code)",
    }
    saves = Kind.PARAMETERS
    needs_always = frozenset({Fact.ONE_RANK, BLOCKS, SEPARATE_MEMORY, REAL_WEIGHTS, SHARDABLE, STEADY_WEIGHTS})
    breaks_always = frozenset({Fact.DEVICE_WEIGHTS, Fact.WHOLE_PARAMS})

    def __post_init__(self) -> None:
        allowed = "null (a plan chooses as many as fit) or at least 0"
        require(self.resident is None or self.resident >= 0, "weights.resident", self.resident, allowed)
        check_folder("weights.folder", self.folder)

    def left_to_plan(self) -> str | None:
        return "resident" if self.resident is None else None

    def remedies(self) -> Mapping[Kind, int]:
        return {} if self.resident is None else {Kind.PARAMETERS: 15}

    def chosen_value(self, numbers: Sequence[int]) -> int:
        return len(numbers)

    def apply(self, rig: Rig) -> Rig:
        room, blocks = self.room(rig.device), rig.structure.blocks
        tables = keep_tables_on_host(rig.model, rig.structure.head, blocks, None, room)
        link = link_to(rig.device)
        returns = Returns(link)
        inside = {module for block in blocks for module in block.modules()}
        outside = WeightGroup([each for each in rig.model.modules() if each not in inside], tables, link, returns)
        of_blocks = [WeightGroup([*block.modules()], (), link, returns) for block in blocks]
        num_resident = self.resident or 0
        give_slots(rig, [outside, *of_blocks[:num_resident]], of_blocks[num_resident:])
        for group in (outside, *of_blocks):
            group.keep_on_host(room)
        prefetcher = Prefetcher(outside, of_blocks, returns)
        prefetcher.accompany(rig.model, blocks)
        return replace(rig, sync=partial(prefetcher.part, rig), finish=partial(prefetcher.finish, rig.finish))

    def room(self, device: torch.device) -> host.Room:
        """What makes the memory in which weights wait. Their optimizer's states follow them into a file."""
        if self.folder is not None:
            return HostFile(self.folder).empty_like
        return partial(host.empty_like, pin=self.pin_memory and not host.is_device(device))


def give_slots(rig: Rig, residents: Sequence[WeightGroup], others: Sequence[WeightGroup]) -> None:
    """Give each of the residents a slot of its own, and the others in turn one of those that they share."""
    sharing = [[each] for each in residents] + [[*others[number::NUM_SHARED]] for number in range(NUM_SHARED)]
    sizes = [max((group.num_bytes for group in each), default=0) for each in sharing]
    memory = torch.empty(sum(sizes), dtype=torch.uint8, device=rig.device)
    rig.model.register_buffer(SLOTS, memory, persistent=False)  # so that all count it as the model's
    for groups, part in zip(sharing, memory.split(sizes), strict=True):
        slot = Slot(part)
        for group in groups:
            group.slot = slot


@final
class Prefetcher:
    """Has weights arrive before they are read, in forward and backward passes.

    Args:
        outside: what belongs to no block.
        of_blocks: in the order of the forward pass.
    """

    def __init__(self, outside: WeightGroup, of_blocks: Sequence[WeightGroup], returns: Returns) -> None:
        self.outside, self.of_blocks, self.returns = outside, of_blocks, returns
        self.in_backward: WeightGroup | None = None
        self.is_in_step = False  # where nobody but the stepper writes to weights

    @contextmanager
    def part(self, rig: Rig, is_last: bool) -> Iterator[None]:
        """Around forward and backward of one part. Counts the gradients of tables, which go to the host by
        themselves."""
        self.is_in_step = True
        try:
            with rig.sync(is_last):
                yield
        finally:
            self.is_in_step = False
            self.rest()
        on_device = {weight for group in (self.outside, *self.of_blocks) for weight in group.copies}
        host.traffic.to_host_bytes += sum(each.nbytes for each in rig.trainable if each not in on_device)

    def finish(self, others: Callable[[], None]) -> None:
        """After an update, which has written to the weights."""
        others()
        self.forget()

    def forget(self) -> None:
        """Have all weights arrive anew: not every way to write to them shows in their versions."""
        for group in (self.outside, *self.of_blocks):
            group.forget()

    def accompany(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        eagerly: Any = torch.compiler.disable  # whoever compiles the model
        model.register_forward_pre_hook(eagerly(self.begin), prepend=True)
        model.register_forward_hook(eagerly(self.end), always_call=True)
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(eagerly(partial(self.enter, number)), prepend=True)
            block.register_forward_hook(eagerly(partial(self.leave, number)), always_call=True)

    def begin(self, *_: Any) -> None:
        """Before the model's forward pass, which a backward pass may compute again."""
        if current_node() is None:
            self.rest()
            self.returns.begin()
        if not self.is_in_step:
            self.forget()
        self.outside.enter()
        self.of_blocks[0].prefetch()

    def end(self, *_: Any) -> None:
        self.outside.leave()

    def enter(self, number: int, *_: Any) -> None:
        """Before a block's forward pass. The next block's weights take the place of those of the block before this one,
        which has computed when all is done that is queued by now."""
        self.of_blocks[number].enter()
        self.prefetch_block(number + 1)

    def leave(self, number: int, block: nn.Module, inputs: Any, outputs: Any) -> None:
        self.of_blocks[number].leave()
        leaves = tree_leaves(outputs)
        made = [each for each in leaves if isinstance(each, Tensor) and each.requires_grad]
        hidden = next((each for each in leaves if not isinstance(each, Tensor | int | float | str | None)), None)
        if hidden is not None and not made and torch.is_grad_enabled():
            raise Incompatible(
                f"weights=stream needs that gradients reach a block through what it returns: {type(block).__name__}"
                f" returns a {type(hidden).__name__}, in which no tensor is found. Return tensors, or choose"
                " weights=device"
            )
        if made:
            register_multi_grad_hook(made, lambda *_: self.enter_backward(number), mode="any")

    def enter_backward(self, number: int) -> None:
        """Before a block's backward pass, which may call its modules again."""
        if self.in_backward is None:
            after_backward(self.rest)
        self.returns.next_turn()
        self.rest()
        self.in_backward = self.of_blocks[number]
        self.in_backward.enter()
        self.prefetch_block(number - 1)

    def rest(self) -> None:
        """No block's backward pass is running."""
        if self.in_backward is not None:
            self.in_backward.leave()
        self.in_backward = None

    def prefetch_block(self, number: int) -> None:
        if 0 <= number < len(self.of_blocks):
            self.of_blocks[number].prefetch()
