"""Finds the head of a model by trial: the linear layer whose product is what the model returns, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import Tensor, UntypedStorage, nn

from lowvram.compat.torch_modes import TorchDispatchMode
from lowvram.compat.torch_trees import tree_leaves
from lowvram.core.layers import is_plain_linear
from lowvram.core.outputs import logits_of


def find_head(model: nn.Module, call: Callable[[nn.Module, Any], Any], inputs: Any) -> str | None:
    """The name of the plain linear layer that the model calls once, and whose output, which nothing reads or writes
    afterwards, are the logits, both in training and in evaluations. None if there is none.

    Args:
        model: a copy, under a fake mode, in training mode; it is left in evaluation mode.
    """
    plain = {module: name for name, module in model.named_modules() if is_plain_linear(module)}
    watch = Products()
    for layer in plain:
        layer.register_forward_hook(watch.note)
    found = set[str | None]()
    for mode in (True, False):
        watch.begin()
        with watch:
            logits = logits_of(call(model.train(mode), inputs))
        found.add(next((name for layer, name in plain.items() if watch.is_last(layer, logits)), None))
    return found.pop() if len(found) == 1 else None


@final
class Products(TorchDispatchMode):
    """Notes the outputs of layers, and which of them an operator is given afterwards."""

    def begin(self) -> None:
        self.outputs: dict[nn.Module, list[Tensor]] = {}
        self.fresh: dict[int, UntypedStorage] = {}  # of outputs; kept, so that their ids aren't used again
        self.read: set[int] = set()

    def note(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        """The hook after a layer's forward pass."""
        del inputs
        self.outputs.setdefault(layer, []).append(output)
        self.fresh[id(output.untyped_storage())] = output.untyped_storage()

    def is_last(self, layer: nn.Module, logits: Any) -> bool:
        """Whether the layer was called once, for these logits, which nobody has used."""
        match self.outputs.get(layer, []):
            case [output]:
                return output is logits and id(output.untyped_storage()) not in self.read
            case _:
                return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        storages = (each.untyped_storage() for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
        self.read |= {id(storage) for storage in storages} & self.fresh.keys()
        return func(*args, **(kwargs or {}))
