"""Segments of consecutive blocks, of which only the first keeps its inputs: the backward pass computes those of the
others again.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016). A model's own code calls its blocks, so nothing can
wrap a segment as a whole. Instead, each call of a block looks where its inputs come from. If a call of the present
segment has returned them, only their `Origin` is kept; all other inputs are kept themselves. So a model may do anything
between two blocks: where it changes what they hand over, a new segment begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from lowvram.compat.torch_autograd import version_of
from lowvram.compat.torch_trees import tree_leaves, tree_map_only
from lowvram.config.errors import Incompatible
from lowvram.core.recomputed import Surroundings, has_backward, inputs_kept, tensors_of, with_objects_as_first
from lowvram.core.repeat import Again, Repeatable

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # of a block's forward pass, by position and by name


class Origin(NamedTuple):
    """An output of a call in a segment."""

    call: int  # its number
    leaf: int  # the tensor's place among the leaves of what the call returned


class Output(NamedTuple):
    """What is known of a tensor that a block has returned."""

    segment: weakref.ref[Segment]
    origin: Origin
    version: int


@final
class Segments:
    """Has blocks compute their activations again, and their inputs, too, in segments of at most `length` calls."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.outputs: MutableMapping[Tensor, Output] = WeakIdKeyDictionary()

    def recompute(self, block: nn.Module) -> None:
        """Patch a block."""
        repeatable, forward = Repeatable(block, is_checked=True), block.forward

        def recomputed(*inputs: Any, **named: Any) -> Any:
            if not has_backward(block, (inputs, named)):
                return forward(*inputs, **named)
            tensors = tensors_in((inputs, named))
            segment = self.segment_of(tensors)
            passes = repeatable.passes()
            repeated = with_objects_as_first(forward, (inputs, named))
            anchor = (*tensors_of((inputs, named)), *block.parameters())[0]
            call = Call(repeated, passes.again, (inputs, named), self.origins_in(segment), Surroundings(anchor))
            turn = Turn(segment, segment.begin(call), (inputs, named))
            keywords = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": lambda: passes}
            # torch notes whether autocast is on for the devices of what it is given.
            with inputs_kept(block, (inputs, named)):
                outputs = checkpoint(turn, anchor.new_empty(0), **keywords)
            for leaf, tensor in enumerate(tree_leaves(outputs)):
                if isinstance(tensor, Tensor):
                    origin = Origin(turn.number, leaf)
                    self.outputs[tensor] = Output(weakref.ref(segment), origin, version_of(tensor))
            return outputs

        block.forward = recomputed

    def segment_of(self, inputs: list[Tensor]) -> Segment:
        """The segment that a call with these inputs continues, or a new one."""
        segments = (output.segment() for tensor in inputs if (output := self.output(tensor)))
        return next((one for one in segments if one is not None and len(one.calls) < self.length), None) or Segment()

    def origins_in(self, segment: Segment) -> Callable[[Tensor], Origin | None]:
        """A function that gives the origin of a tensor in a segment; None: it comes from elsewhere."""

        def origin_of(tensor: Tensor) -> Origin | None:
            output = self.output(tensor)
            return output.origin if output is not None and output.segment() is segment else None

        return origin_of

    def output(self, tensor: Tensor) -> Output | None:
        """What is known of a tensor; None if no block has returned it, or if it has been changed in place since."""
        output = self.outputs.get(tensor)
        return output if output is not None and output.version == version_of(tensor) else None


@final
class Segment:
    """Consecutive calls of blocks. Autograd's graph keeps it alive as long as one of them may have to run again."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.again: dict[Origin, Tensor] = {}  # outputs that were computed again, until they are used
        self.read: dict[int, tuple[Tensor, ...]] = {}  # the kept inputs of calls that ran again, until they are used

    def begin(self, call: Call) -> int:
        """Add a call; returns its number."""
        self.calls.append(call)
        return len(self.calls) - 1

    def arguments(self, number: int) -> Arguments:
        """The arguments of a call, for its recomputation. What other calls of the segment have returned is computed
        again, together with all that calls before this one will need; each tensor is given away once."""
        call = self.calls[number]
        missing = [origin.call for origin in call.origins if origin not in self.again]
        if missing:
            self.repeat(max(missing))
        again = {origin: self.again.pop(origin) for origin in call.origins}
        return call.arguments(again, self.read.pop(number, None) or call.kept())

    def repeat(self, last: int) -> None:
        """Run the calls up to `last` again, and keep those of their outputs that are inputs of others."""
        needed = {origin for call in self.calls for origin in call.origins}
        for number, call in enumerate(self.calls[: last + 1]):
            self.read[number] = call.kept()  # once: another knob may have to fetch them from the host
            for leaf, tensor in enumerate(tree_leaves(call.repeat(self.again, self.read[number]))):
                if (origin := Origin(number, leaf)) in needed:
                    self.again[origin] = tensor.detach()


@final
@dataclass(frozen=True)
class Input:
    """A tensor that a call was given."""

    origin: Origin | None  # None: the tensor is kept
    requires_grad: bool


@final
class Call:
    """A call of a block, with what it takes to run it again."""

    def __init__(
        self,
        forward: Callable[..., Any],
        again: Again,
        arguments: Arguments,
        origin_of: Callable[[Tensor], Origin | None],
        surroundings: Surroundings,
    ) -> None:
        self.forward, self.again, self.surroundings = forward, again, surroundings
        tensors = tensors_in(arguments)
        self.inputs = tree_map_only(Tensor, lambda each: Input(origin_of(each), each.requires_grad), arguments)
        origins = (each.origin for each in tree_leaves(self.inputs) if isinstance(each, Input))
        self.origins = {origin for origin in origins if origin is not None}
        self.keeper = saved([tensor for tensor in tensors if origin_of(tensor) is None])

    def kept(self) -> tuple[Tensor, ...]:
        """The arguments' tensors that no call of the segment has returned."""
        return self.keeper.grad_fn.saved_tensors  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]

    def arguments(self, again: Mapping[Origin, Tensor], kept: tuple[Tensor, ...]) -> Arguments:
        """The arguments, from what was computed again and what is kept."""
        rest = iter(kept)

        def tensor_of(each: Input) -> Tensor:
            tensor = next(rest) if each.origin is None else again[each.origin]
            return tensor.detach().requires_grad_(each.requires_grad)

        return tree_map_only(Input, tensor_of, self.inputs)

    def repeat(self, again: Mapping[Origin, Tensor], kept: tuple[Tensor, ...]) -> Any:
        """What the call returned, computed again. It has a graph, as torch chooses kernels by what requires a gradient;
        but the graph keeps no tensors."""
        inputs, named = self.arguments(again, kept)
        with torch.enable_grad(), saved_tensors_hooks(drop, refuse), self.surroundings.autocast(), self.again:
            return self.forward(*inputs, **named)


@final
class Turn:
    """A call as torch's checkpoint runs it: first with its arguments as they are, later with those of the segment."""

    def __init__(self, segment: Segment, number: int, arguments: Arguments) -> None:
        self.segment, self.number, self.fresh = segment, number, [arguments]

    def __call__(self, _: Tensor) -> Any:
        inputs, named = self.fresh.pop() if self.fresh else self.segment.arguments(self.number)
        return self.segment.calls[self.number].forward(*inputs, **named)


@final
class Keep(torch.autograd.Function):
    """Saves tensors as operators do, so that hooks of other knobs take effect, and changes in place are noticed. It has
    no backward pass: no loss depends on what it returns."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)


def saved(tensors: list[Tensor]) -> Tensor:
    """A tensor whose `grad_fn.saved_tensors` are these while it is alive. It belongs to no loss, so no backward pass
    frees them."""
    return Keep.apply(torch.empty(0, requires_grad=True), *(tensor.detach() for tensor in tensors))  # pyright: ignore[reportReturnType]


def tensors_in(arguments: Arguments) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]


def drop(_: Tensor) -> None:
    """A hook of saved tensors that saves nothing."""


def refuse(_: None) -> Tensor:
    """The hook that would read them. Raises Incompatible."""
    raise Incompatible(
        "ckpt=sqrt needs blocks without a backward pass inside their forward pass (torch.autograd.grad): choose"
        " ckpt=every1 or ckpt=none"
    )
