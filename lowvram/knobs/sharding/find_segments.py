"""Finds out by trial whether a model is a front, blocks one after another and a tail, between which nothing goes but
one tensor, and which of these read which weights.

One forward pass on fake tensors. What depends on weights is followed from operator to operator; masks and positions,
which depend on the inputs alone, each rank computes itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from torch import Tensor, UntypedStorage, nn
from torch.utils.flop_counter import flop_registry

from lowvram.compat.torch_modes import TorchDispatchMode
from lowvram.compat.torch_ops import CopyOps
from lowvram.compat.torch_trees import tree_leaves
from lowvram.config.errors import Incompatible
from lowvram.config.texts import first_line
from lowvram.core.probes.fake_pass import fake_pass
from lowvram.core.structure import Blocks, Probe, Structure
from lowvram.core.values import own_tensors

MEND = "choose sharding=fsdp or sharding=tensor"
FRONT = 0  # segments are numbered: the front, the blocks from 1 on, the tail


@final
@dataclass(frozen=True)
class Segments:
    """A model as segments: what it computes before its blocks (number 0), the blocks, what it computes after them.

    Args:
        blocks: their dotted names, in order.
        arguments: where each is given what the one before has made: a place or a name.
        in_tuple: of each whether it returns a tuple, whose first tensor the next one is given.
        readers: the segments that read each parameter and buffer, by its first name.
        flops: of each segment, of few samples; relative to each other.
    """

    blocks: tuple[str, ...]
    arguments: tuple[int | str, ...]
    in_tuple: tuple[bool, ...]
    readers: Mapping[str, frozenset[int]]
    flops: tuple[int, ...]

    @property
    def tail(self) -> int:
        """The number of the tail."""
        return len(self.blocks) + 1


@final
@dataclass(frozen=True)
class FindSegments(Probe[Segments]):
    """The segments of a model.

    Args:
        names: of its parameters and buffers, to which knobs add.
    """

    names: tuple[str, ...]

    def find(self, known: Structure) -> Segments:
        """Raises Incompatible if something else goes between blocks."""
        blocks = known.get(Blocks()).blocks

        def followed(copy: nn.Module, fake: Any) -> Segments:
            following = Following(copy, blocks)
            with following:
                known.call(copy, fake)
            return following.segments()

        try:
            return fake_pass(known.model, followed, known.short_example(2))
        except Incompatible:
            raise
        except Exception as error:
            what = f"this model can't be tried without memory ({first_line(error)})"
            raise Incompatible(f"sharding=pipeline: {what}: {MEND}") from error


@final
class Following(TorchDispatchMode):
    """Follows what depends on weights through one forward pass.

    Args:
        names: of the blocks.
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names, self.now, self.is_inside = names, FRONT, True
        self.weights: dict[int, str] = {}
        self.memory: list[UntypedStorage] = []  # kept, so that ids aren't used again
        self.made_in: dict[int, int] = {}  # the segment that has made what depends on weights
        self.stream: Any = None  # what the last block has made
        self.arguments: list[int | str] = []
        self.in_tuple: list[bool] = []
        self.trouble: str | None = None
        self.readers: dict[str, set[int]] = {}
        self.flops = [0] * (len(names) + 2)
        for name, tensor in named_once(model):
            self.weights.setdefault(self.key(tensor), name)
        self.buffers = {self.key(tensor) for tensor in model.buffers()}
        for number, name in enumerate(names, 1):
            block = model.get_submodule(name)
            block.register_forward_pre_hook(partial(self.begin, number), with_kwargs=True)
            block.register_forward_hook(partial(self.end, number))

    def key(self, tensor: Tensor) -> int:
        """Of the memory of a tensor."""
        storage = tensor.untyped_storage()
        self.memory.append(storage)
        return id(storage)

    def begin(self, number: int, block: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """The hook before a block."""
        if number != self.now + 1 or not (self.is_inside or self.now):
            self.refuse(f"{self.names[number - 1]} isn't called once, after the block before it")
            return
        places = [*enumerate(given), *named.items()]
        dependent = [each for each in tree_leaves((given, named)) if self.depends(each)]
        found = [place for place, value in places if any(value is each for each in dependent)]
        if len(dependent) != 1 or len(found) != 1:
            self.refuse(f"{self.names[number - 1]} is given {len(dependent)} tensors that depend on weights, not one")
        stream = (*dependent, None)[0]
        if number > 1 and stream is not self.stream:
            self.refuse(f"the model changes what {self.names[number - 2]} has made before the next block is given it")
        self.arguments.append((*found, 0)[0])
        self.now, self.is_inside, self.stream = number, True, stream

    def end(self, number: int, block: nn.Module, given: Any, made: Any) -> None:
        """The hook after a block."""
        if number != self.now:
            return
        is_tuple = isinstance(made, tuple)
        first = made[0] if is_tuple and made else made
        others = [each for each in tree_leaves(made) if each is not first and self.depends(each)]
        if not isinstance(first, Tensor) or others:
            self.refuse(f"{self.names[number - 1]} doesn't return one tensor, or a tuple that begins with it")
            first = first if isinstance(first, Tensor) else None
        self.in_tuple.append(is_tuple)
        self.stream, self.is_inside = first, number == len(self.names)
        if self.is_inside:
            self.now = number + 1

    def depends(self, value: Any) -> bool:
        """Whether it is a tensor that depends on weights."""
        return isinstance(value, Tensor) and self.key(value) in self.made_in

    def refuse(self, what: str) -> None:
        """Note why the model can't be cut. Raises nothing, as torch dies of errors under some operators."""
        self.trouble = self.trouble or what

    def where(self, segment: int) -> str:
        """A segment, for messages."""
        if segment == FRONT:
            return "what stands before the blocks"
        return "what stands after the blocks" if segment > len(self.names) else self.names[segment - 1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {self.key(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        read = given & self.weights.keys()
        for each in read:
            self.readers.setdefault(self.weights[each], set()).add(self.now)
        dependent = given & self.made_in.keys()
        if (read - self.buffers or dependent) and not self.is_inside:
            self.refuse(f"the model computes between {self.where(self.now)} and the block after it")
        if dependent and self.now == FRONT and func is CopyOps.NUMBER.default:
            self.refuse(f"{self.where(FRONT)} reads a number from what depends on weights")
        for each in dependent:
            if self.made_in[each] != self.now and (self.stream is None or each != self.key(self.stream)):
                self.refuse(f"{self.where(self.now)} reads what {self.where(self.made_in[each])} has made")
        if read - self.buffers or dependent:
            for each in tree_leaves(made):
                if isinstance(each, Tensor) and self.key(each) not in read - self.buffers:
                    self.made_in[self.key(each)] = self.now
        if func.overloadpacket in flop_registry:
            self.flops[self.now] += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=made)
        return made

    def segments(self) -> Segments:
        """What was found, after the pass."""
        if self.now != len(self.names) + 1:
            self.refuse(f"{self.names[self.now]} isn't called after the block before it")
        if self.trouble is not None:
            raise Incompatible(f"sharding=pipeline can't cut this model into stages: {self.trouble}: {MEND}")
        readers = {name: frozenset(each) for name, each in self.readers.items()}
        return Segments(self.names, tuple(self.arguments), tuple(self.in_tuple), readers, tuple(self.flops))


def names_of(model: nn.Module) -> tuple[str, ...]:
    """The names of all its parameters and buffers."""
    return tuple(name for name, _ in named_once(model))


def named_once(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each parameter and buffer, by the first of its names."""
    seen = set[int]()
    for prefix, module in model.named_modules():
        for name, tensor in own_tensors(module):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{prefix}.{name}" if prefix else name, tensor
