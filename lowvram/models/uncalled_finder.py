"""Finds out by trial with which layers' weights a model computes without calling the layer, as in
`F.linear(x, self.up.weight)`. What is put in the layer's place, such as one with an adapter, then has no effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import Tensor, UntypedStorage, nn

from lowvram.compat.torch_modes import TorchDispatchMode
from lowvram.compat.torch_trees import tree_leaves
from lowvram.models.fake_pass import fake_pass, tell_untried


def find_uncalled(model: nn.Module, call: Callable[[nn.Module, Any], Any], inputs: Any) -> frozenset[str]:
    """The names of such layers; none if the model can't run on fake tensors. It may be on any device and isn't changed.

    Args:
        call: calls the model on inputs and returns its outputs.
        inputs: of two samples or more, on the CPU.
    """

    def watched(copy: nn.Module, fake: Any) -> frozenset[str]:
        called = set[nn.Module]()
        weights = {
            name: dict(each.named_parameters(recurse=False)).get("weight") for name, each in copy.named_modules()
        }
        for module in copy.modules():
            module.register_forward_pre_hook(lambda module, _: called.add(module))
        with Used() as used:
            call(copy, fake)
        idle = {name for name, module in copy.named_modules() if module not in called}
        return frozenset(name for name in idle if (weight := weights[name]) is not None and weight in used)

    try:
        return fake_pass(model, watched, inputs)
    except Exception as error:
        unknown = "whether it calls each layer; an adapter or qat has no effect on a layer whose weight it only reads"
        tell_untried(model, unknown, error)
        return frozenset()


@final
class Used(TorchDispatchMode):
    """Notes the memory that operators are given."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, UntypedStorage] = {}  # kept, so that their ids aren't used again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                self.storages[id(storage)] = storage
        return func(*args, **(kwargs or {}))

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor.untyped_storage()) in self.storages
