"""Finds out by trial whether a model's forward pass writes into its weights, as `weight.data.clamp_(0)` does, and an
embedding with a largest norm.

A write would happen twice where a block is computed again, and is lost where a layer computes with a copy of its
weight. One forward pass on fake tensors tells; a weight's version wouldn't, as it doesn't count writes to `.data`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, final

from torch import Tensor, UntypedStorage, nn

from lowvram.compat.torch_modes import TorchDispatchMode
from lowvram.compat.torch_modules import hooks_of
from lowvram.compat.torch_ops import schema_of
from lowvram.core.fact import ModelFact
from lowvram.core.probes.fake_pass import tried
from lowvram.core.structure import Probe, Structure

# Packages whose modules write into no weight, but for the following, and by hooks and forward passes that others give
# to a module.
QUIET = ("torch", "lowvram")
LOOKING_UP = (nn.Embedding, nn.EmbeddingBag)


class Written(NamedTuple):
    """Names of weights that a forward pass writes into; None: it writes into none, or that isn't known."""

    anywhere: str | None = None
    in_blocks: str | None = None  # while a block computes


@final
@dataclass(frozen=True)
class WrittenWeights(Probe[Written]):
    """Which weights a forward pass writes into."""

    def find(self, known: Structure) -> Written:
        """The first weight of each kind."""
        if not any(may_write(module) for module in known.model.modules()):
            return Written()
        names = {module: name for name, module in known.model.named_modules()}
        blocks = [names[block] for block in known.blocks]

        def watched(copy: nn.Module, fake: Any) -> Written:
            everywhere, in_blocks = Writes(), Writes()
            for block in blocks:
                watch(copy.get_submodule(block), in_blocks)
            held = {name: (weight, weight.untyped_storage()) for name, weight in copy.named_parameters()}
            with everywhere:
                known.call(copy, fake)
            of_blocks = {name for name in held if any(name.startswith(f"{block}.") for block in blocks)}
            written = [name for name, place in held.items() if is_written(copy.get_parameter(name), *place, everywhere)]
            replaced = [name for name in written if name in of_blocks and held[name][1] not in everywhere]
            return Written(
                next(iter(written), None),
                next((name for name in written if held[name][1] in in_blocks or name in replaced), None),
            )

        unknown = "whether its forward pass writes into its weights"
        unknown += "; if it does, leave ckpt, tile, offload and the like neutral"
        return tried(known.model, watched, known.short_example(2), unknown, Written())


def remedy_for(name: str | None) -> str | None:
    remedy = "compute a new tensor from it there, or choose another option"
    return None if name is None else f"it writes into {name}: {remedy}"


STEADY_WEIGHTS = ModelFact(
    "a forward pass leaves the weights as they are", lambda known: remedy_for(known.get(WrittenWeights()).anywhere)
)
STEADY_BLOCKS = ModelFact(
    "a block's forward pass leaves its weights as they are",
    lambda known: remedy_for(known.get(WrittenWeights()).in_blocks),
)


def may_write(module: nn.Module) -> bool:
    is_others = type(module).__module__.partition(".")[0] not in QUIET
    runs_others = bool(hooks_of(module)) or "forward" in vars(module)
    return is_others or runs_others or (isinstance(module, LOOKING_UP) and module.max_norm is not None)


def is_written(now: Tensor, before: Tensor, storage: UntypedStorage, writes: Writes) -> bool:
    """Whether a weight's memory was written into, or the weight is in another one than before."""
    return now is not before or now.untyped_storage() is not storage or storage in writes


@final
class Writes(TorchDispatchMode):
    """Notes the memory that operators write into."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, UntypedStorage] = {}  # kept, so that their ids aren't used again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = schema_of(func)
        if schema.is_mutable:
            given = dict(zip([each.name for each in schema.arguments], args, strict=False)) | kwargs
            for argument in schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self.note(given.get(argument.name))
        return func(*args, **kwargs)

    def note(self, value: Any) -> None:
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                self.storages[id(storage)] = storage

    def __contains__(self, storage: UntypedStorage) -> bool:
        return id(storage) in self.storages


def watch(block: nn.Module, writes: Writes) -> None:
    """Note what is written while a block computes."""
    forward = block.forward

    def watched(*inputs: Any, **named: Any) -> Any:
        with writes:
            return forward(*inputs, **named)

    block.forward = watched
