"""Finds out what a model's forward pass does, beside computing its result, that torch.compile would get wrong.

Run eagerly a block can be computed again as it ran first; inside a compiled graph torch sees to its own generator
alone. Compiled even once, code of torch's (2.13) draws the same numbers from a `random.Random` of the model's own in
each step, and its backward pass reads tensors that the forward pass has changed in place as they are afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import nn

from lowvram.compat.torch_modes import TorchDispatchMode
from lowvram.compat.torch_modules import BatchNorm, own_buffers
from lowvram.core.changes import Change, OfEntry
from lowvram.core.generators import PYTHONS, OfPython, OfTorch, sources_of
from lowvram.core.places import containers_in, tensors_in
from lowvram.core.probes.fake_pass import tried
from lowvram.core.probes.writes import Writes
from lowvram.core.repeat import First, Repeatable
from lowvram.core.structure import Probe, Structure

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # buffers of a BatchNorm


class Obstacles(NamedTuple):
    """What a forward pass does, as a clause for messages; None: no such thing."""

    unrepeatable: str | None = None  # a compiled graph could not compute the block again
    uncompilable: str | None = None  # a compiled graph would be wrong


@final
@dataclass(frozen=True)
class CompileObstacles(Probe[Obstacles]):
    """What a forward pass does that compiled graphs can't repeat, or would get wrong.

    Args:
        repeats_blocks: whether blocks may be computed again.
        compiles_blocks: whether each block is compiled by itself; else the whole model is.
    """

    repeats_blocks: bool
    compiles_blocks: bool

    def find(self, known: Structure) -> Obstacles:
        """The first of each kind."""
        blocks = known.blocks if self.repeats_blocks or self.compiles_blocks else []
        compiled = blocks if self.compiles_blocks else [known.model]
        name_of = {module: name for name, module in known.model.named_modules()}
        looks, compiled_looks = list[Pass](), list[Pass]()

        def watched(copy: nn.Module, fake: Any) -> Obstacles:
            for module in blocks:
                watch(copy.get_submodule(name_of[module]), looks)
            for module in compiled:
                watch(copy.get_submodule(name_of[module]), compiled_looks)
            known.call(copy, fake)
            return Obstacles(
                next((what for each in looks if (what := unrepeatable(each)) is not None), None),
                next((what for each in compiled_looks if (what := uncompilable(each)) is not None), None),
            )

        unknown = "whether its forward pass draws, or changes what it holds; if it does, choose compile=none"
        return tried(known.model, watched, known.short_example(2), unknown, Obstacles())


@final
class OwnDraws(TorchDispatchMode):
    """Notes whether an operator is given a generator. Without memory none moves."""

    has_any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.has_any |= any(isinstance(each, torch.Generator) for each in (*args, *kwargs.values()))
        return func(*args, **kwargs)


class Pass(NamedTuple):
    """A forward pass of a module."""

    module: nn.Module
    first: First
    draws: OwnDraws
    writes: Writes


def watch(module: nn.Module, passes: list[Pass]) -> None:
    forward, repeatable = module.forward, Repeatable(module)

    def watched(*inputs: Any, **named: Any) -> Any:
        this = Pass(module, repeatable.passes().first, OwnDraws(), Writes())
        passes.append(this)
        with this.first, this.draws, this.writes:
            return forward(*inputs, **named)

    module.forward = watched


def unrepeatable(this: Pass) -> str | None:
    """What a block did that a compiled recomputation would do twice, or otherwise."""
    kind, changes = type(this.module).__name__, this.first.changes
    if this.draws.has_any:
        return f"{kind} draws from a torch.Generator of its own"
    drawn = [source for source, _ in this.first.drawn if not isinstance(source, OfTorch)]
    if drawn:
        return f"{kind} draws from {drawn[0].name}"
    counting = next((norm for norm in this.first.places.norms if norm.momentum is None), None)
    if counting is not None:  # torch.compile leaves its count to Python
        return f"{type(counting).__name__} with momentum=None counts forward passes"
    what = changes[0].what if changes else unversioned(this)
    return None if what is None else f"{what} changes in each forward pass"


def unversioned(this: Pass) -> str | None:
    """A tensor that a block holds and has written into, through `.data`: its version doesn't tell."""
    held = tensors_in(this.first.places, containers_in(this.first.places))
    return next((what for what, _, _, tensor in held if tensor.untyped_storage() in this.writes), None)


def uncompilable(this: Pass) -> str | None:
    """What a module did that a compiled graph would do wrongly."""
    module, first = this.module, this.first
    drawn = [source for source, _ in first.drawn if isinstance(source, OfPython)]
    own = next((source for source in drawn if source.generator is not PYTHONS.generator), None)
    if own is not None:
        return (
            f"{type(holder_of(own, module)).__name__} draws from a random.Random of its own, whose numbers may stay the"
            " same in every step: let it call the functions of random"
        )
    written = next((change for change in first.changes if is_written(change, module)), None)
    if written is None:
        return None
    return (
        f"{written.what} is changed in place by each forward pass, and the backward pass may read it as it is"
        " afterwards: assign a new tensor to it"
    )


def holder_of(source: OfPython, module: nn.Module) -> nn.Module:
    """The innermost module that holds a generator, or whose file does."""
    inner = reversed(list(module.modules()))
    return next((each for each in inner if any(source.generator is held for held in generators_of(each))), module)


def generators_of(module: nn.Module) -> list[Any]:
    return [getattr(each, "generator", None) for each in sources_of(module)]


def is_written(change: Change, module: nn.Module) -> bool:
    """Whether a change is of a tensor, in place. Torch's own modules see to it that their graphs are right, and no
    backward pass of a BatchNorm in training reads its statistics, also of classes derived from torch's."""
    if not isinstance(change, OfEntry) or not change.is_copied:
        return False
    exempt = (each for each in module.modules() if is_torchs(each) or is_statistic(change, each))
    return all(change.owner is not vars(each) and change.owner is not own_buffers(each) for each in exempt)


def is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def is_statistic(change: OfEntry, module: nn.Module) -> bool:
    return isinstance(module, BatchNorm) and change.name in STATISTICS
