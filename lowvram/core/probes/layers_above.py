"""How many layers stand above each parameter of a model, in the order of its forward pass: for learning rates that
decay from layer to layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn

from lowvram.compat.torch_modes import TorchDispatchMode
from lowvram.compat.torch_trees import tree_leaves
from lowvram.core.fact import ModelFact
from lowvram.core.probes.fake_pass import tried
from lowvram.core.structure import Blocks, Probe, Structure


@final
@dataclass(frozen=True)
class LayersAbove(Probe[Mapping[str, int] | None]):
    """How many layers stand above each parameter, by all names of the parameter. Layers are the blocks, and the head as
    one more: 1 in the last block, as many as there are blocks in the first, one more before it, 0 behind the last one
    (timm's and BEiT's layer decay count alike). A parameter outside of all blocks stands where it is first read; so
    does one that a block shares with the head. None: the model can't be tried without memory."""

    def find(self, known: Structure) -> Mapping[str, int] | None:
        blocks = known.get(Blocks()).blocks

        def watched(copy: nn.Module, fake: Any) -> Mapping[str, int]:
            reads = FirstReads(copy, blocks)
            with reads:
                known.call(copy, fake)
            return reads.layers_above()

        unknown = "which of its weights are read before its blocks: no learning rate can decay from layer to layer"
        return tried(known.model, watched, known.short_example(2), unknown, None)


@final
class FirstReads(TorchDispatchMode):
    """Notes how many blocks have begun when a parameter is first read."""

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        super().__init__()
        self.model, self.blocks = model, blocks
        self.begun: set[str] = set()
        named = model.named_parameters(remove_duplicate=False)
        self.names: dict[int, list[str]] = {}
        for name, parameter in named:
            self.names.setdefault(id(parameter.untyped_storage()), []).append(name)
        self.unread, self.num_begun = {*self.names}, dict[str, int]()
        for name in blocks:
            model.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: self.begun.add(name))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, Tensor) and (memory := id(each.untyped_storage())) in self.unread:
                self.unread.discard(memory)
                self.num_begun |= dict.fromkeys(self.names[memory], len(self.begun))
        return func(*args, **(kwargs or {}))

    def layers_above(self) -> Mapping[str, int]:
        found = {name: above(len(self.blocks) - number) for name, number in self.num_begun.items()}
        for place, block in enumerate(self.blocks):
            inside = [name for name in found if name.startswith(f"{block}.")]
            found |= dict.fromkeys(inside, len(self.blocks) - place)
        for names in self.names.values():  # tied: as deep as the deepest of them
            found |= dict.fromkeys(names, max(found.get(name, 0) for name in names))
        return found


def above(num_blocks: int) -> int:
    """How many layers stand above a place outside of all blocks, given how many blocks follow."""
    return num_blocks + 1 if num_blocks else 0


def layers_above(known: Structure, name: str) -> int:
    """How many layers stand above a parameter, which a knob may have put in, such as an adapter's: as above the others
    of the nearest module that had some."""
    found = known.get(LayersAbove()) or {}
    place = name
    while place:
        near = [number for each, number in found.items() if each == place or each.startswith(f"{place}.")]
        if near:
            return max(near)
        place = place.rpartition(".")[0]
    return max(found.values(), default=0)


def no_order(known: Structure) -> str | None:
    if known.get(LayersAbove()) is not None:
        return None
    return "it can't be tried without memory: give rates by name in optimizer.groups instead"


LAYER_ORDER = ModelFact("the order in which the model reads its weights is known", no_order)
