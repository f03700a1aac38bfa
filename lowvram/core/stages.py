"""A rank's share of a model that is cut into stages: which blocks compute here, and which weights are here.

A stage is the model's own forward pass, in which blocks before the stage pass on what they are given, the stage's first
block is given what another rank has made, and the pass ends with its last block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from lowvram.core.derived import named_like
from lowvram.core.mesh import Ranks
from lowvram.core.shards import local, set_place
from lowvram.core.trainable import ever_trains
from lowvram.core.values import own_tensors


class StageEnds(Exception):
    """Ends a forward pass behind the last block of a stage. Nobody but lowvram catches it.

    Args:
        made: what the block has made, for the next stage.
    """

    def __init__(self, made: Tensor) -> None:
        super().__init__("the rest of the forward pass belongs to another rank")
        self.made = made


@final
@dataclass(frozen=True)
class PipelineStage:
    """A run of blocks.

    Args:
        index: among all stages.
        begin, end: the numbers of its blocks, counted from 0.
        is_last: whether what stands behind the blocks belongs to it.
    """

    index: int
    begin: int
    end: int
    is_last: bool


class Way(Enum):
    """What a stage computes of a part."""

    FORWARD = auto()
    BACKWARD = auto()
    WEIGHTS = auto()  # gradients of weights that the backward pass has held back


class Pass(NamedTuple):
    """A pass of a part through a stage."""

    stage: int
    part: int
    way: Way


@final
class Stages:
    """The stages of a model on this rank, of which at most one computes at a time.

    Args:
        own: those of this rank.
        arguments: where each block of the model is given what the one before has made: a place or a name.
        in_tuple: of each block whether it returns a tuple, whose first tensor the next one is given.
        shared: the names of parameters that other ranks of the pipeline have, too, such as the embedding as the head's
            weight; each with all ranks that have it.
        elsewhere: the names of parameters and buffers that other ranks keep up to date.
        sizes: see `sizes_of`, before the model is cut.
        readers: which stages read each parameter, by its name.
    """

    def __init__(
        self,
        own: Sequence[PipelineStage],
        arguments: Sequence[int | str],
        in_tuple: Sequence[bool],
        shared: Mapping[str, Ranks],
        elsewhere: Collection[str],
        sizes: Sequence[tuple[int, bool]],
        readers: Mapping[str, Collection[int]],
    ) -> None:
        self.own, self.shared, self.elsewhere, self.sizes = own, shared, elsewhere, sizes
        self._arguments, self._in_tuple, self._readers = arguments, in_tuple, readers
        self._stage: PipelineStage | None = None
        self._in_backward: PipelineStage | None = None
        self._received: Tensor | None = None
        self.has_ended = False  # the model's forward pass, with `StageEnds`

    def kept_here(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of a model's tensors, by their names, that this rank keeps up to date."""
        return {name: tensor for name, tensor in tensors.items() if name not in self.elsewhere}

    def with_gradients(self, names: Mapping[nn.Parameter, str]) -> Mapping[nn.Parameter, str]:
        """Those of some parameters that the backward pass reaches around which this is called."""
        stage = self._in_backward
        if stage is None:
            return names
        return {each: name for each, name in names.items() if stage.index in self._readers.get(name, (stage.index,))}

    @contextmanager
    def in_backward(self, stage: PipelineStage) -> Iterator[None]:
        """Around the backward pass of a part through one stage."""
        self._in_backward = stage
        try:
            yield
        finally:
            self._in_backward = None

    @property
    def is_computing(self) -> bool:
        return self._stage is not None

    @contextmanager
    def computing(self, stage: PipelineStage, received: Tensor | None) -> Iterator[None]:
        """Inside it a forward pass of the model computes one stage alone. Without it, the whole model, in which the
        weights of other ranks are zeros.

        Args:
            received: what the stage before has made.
        """
        self._stage, self._received = stage, received
        try:
            yield
        finally:
            self._stage = self._received = None

    def through(self, number: int, call: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """What a call of a block returns.

        Args:
            number: of the block.
            call: computes it.
        """
        stage = self._stage
        if stage is None:
            return call(*given, **named)
        place = self._arguments[number]
        if number < stage.begin:
            stream = named[place] if isinstance(place, str) else given[place]
            return (stream,) if self._in_tuple[number] else stream
        if number == stage.begin and self._received is not None:
            given, named = with_stream(self._received, place, given, named)
        made = call(*given, **named)
        if number + 1 == stage.end and not stage.is_last:
            raise StageEnds(made[0] if self._in_tuple[number] else made)
        return made


def with_stream(
    stream: Tensor, place: int | str, given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A block's arguments with another tensor in this place."""
    if isinstance(place, str):
        return given, named | {place: stream}
    return (*given[:place], stream, *given[place + 1 :]), named


class OfStages:
    """What the classes below add to a model's. Type hints are read in the module that a class names, so they stand
    here: the classes below name the model's module, and transformers reads the hints of each subclass of its models."""

    stages: Stages
    number: int


@cache
def staged_kind(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of blocks like those of `kind` that are parts of a stage. A call goes around everything that a knob
    puts into a block's forward pass."""

    class Staged(kind, OfStages):
        def __call__(self, *given: Any, **named: Any) -> Any:
            return self.stages.through(self.number, super().__call__, given, named)

    return named_like(Staged, kind)


@cache
def ending_kind(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of models like those of `kind` whose forward pass may end with a stage. What is hooked to the pass, as
    by FSDP2, sees it return what the stage has made."""

    class Ending(kind, OfStages):
        def __call__(self, *given: Any, **named: Any) -> Any:
            made = super().__call__(*given, **named)
            if self.stages.has_ended:
                self.stages.has_ended = False
                raise StageEnds(made)
            return made

        def forward(self, *given: Any, **named: Any) -> Any:
            try:
                return super().forward(*given, **named)
            except StageEnds as ends:
                self.stages.has_ended = True
                return ends.made

    return named_like(Ending, kind)


def put_in_stages(model: nn.Module, blocks: Sequence[nn.Module], stages: Stages) -> None:
    """Have the blocks of a model, in order, compute as their stages say."""
    modules: list[Any] = [*blocks]
    for number, block in enumerate(modules):
        block.__class__ = staged_kind(type(block))
        block.stages, block.number = stages, number
    whole: Any = model
    whole.__class__ = ending_kind(type(model))
    whole.stages = stages


def stages_of(model: nn.Module) -> Stages | None:
    """Of a model that is cut; None if it is whole."""
    found = (vars(module).get("stages") for module in model.modules())
    return next((each for each in found if isinstance(each, Stages)), None)


def sizes_of(model: nn.Module) -> Sequence[tuple[int, bool]]:
    """Of each parameter of the whole model the number of weights, and whether they ever train."""
    stages = stages_of(model)
    if stages is not None:
        return stages.sizes
    return [(parameter.numel(), ever_trains(parameter)) for parameter in model.parameters()]


def hide_buffers(model: nn.Module, elsewhere: Collection[str]) -> None:
    """Leave buffers that other ranks keep up to date out of a model's state. They stay, as its forward pass may need
    them."""
    saved = model.state_dict()  # without buffers that no state has
    hidden = {name for name, _ in model.named_buffers() if name in elsewhere and name in saved}

    def leave_out(_: nn.Module, state: dict[str, Any], prefix: str, about: Any) -> None:
        for name in hidden:
            state.pop(f"{prefix}{name}", None)

    def put_back(_: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
        buffers = dict(model.named_buffers())
        for name in hidden:
            state[f"{prefix}{name}"] = buffers[name]

    model.register_state_dict_post_hook(leave_out)
    model.register_load_state_dict_pre_hook(put_back)


def leave_here(model: nn.Module, here: Collection[str], unread: Collection[str], device: torch.device) -> None:
    """Take the parameters that belong to other ranks, and buffers that nothing reads here, from a model without memory.
    Zeros of the same shape take their places, without memory and without names, so that the model still computes, if
    need be.

    Args:
        here: the first names of the parameters that stay.
        unread: those of the buffers that go.
    """
    seen: dict[int, str] = {}
    zeros: dict[torch.dtype, Tensor] = {}
    places: dict[str, int] = {}  # among those that train, as optimizers number them
    for prefix, module in [*model.named_modules()]:
        for name, tensor in own_tensors(module):
            first = seen.setdefault(id(tensor), f"{prefix}.{name}" if prefix else name)
            if not isinstance(tensor, nn.Parameter) and first not in unread:
                continue
            if tensor.requires_grad:
                places.setdefault(first, len(places))
            if first in here:
                set_place(tensor, places.get(first))
            else:
                delattr(module, name)
                if tensor.dtype not in zeros:
                    zeros[tensor.dtype] = torch.zeros((), dtype=tensor.dtype, device=device)
                object.__setattr__(module, name, zeros[tensor.dtype].expand(local(tensor).shape))
