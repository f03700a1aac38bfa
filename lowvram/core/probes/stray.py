"""Finds out by trial whether a model reads weights by other ways than options expect that keep a block's weights
elsewhere (FSDP, host memory), and put them into the block's modules while the block computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, UntypedStorage, nn

from lowvram.compat.torch_autograd import current_node, hooks_of_tensor
from lowvram.compat.torch_modes import TorchDispatchMode
from lowvram.compat.torch_trees import tree_leaves
from lowvram.core.probes.fake_pass import tried
from lowvram.core.structure import Probe, Structure

OURS = "lowvram"


@final
@dataclass(frozen=True)
class StrayRead(Probe[str | None]):
    """How a forward pass reads a weight otherwise than through the weight's own module, while that and its block
    compute, as a clause for messages; None if it reads none so, or that isn't known."""

    def find(self, known: Structure) -> str | None:
        """Also a hook of a parameter, which options that put other weights in the place would drop."""
        for name, weight in known.model.named_parameters():
            if any(is_others(hook) for hooks in hooks_of_tensor(weight) for hook in (hooks or {}).values()):
                return f"{name} has a hook, which would be dropped"
        names = {module: name for name, module in known.model.named_modules()}
        blocks = [names[block] for block in known.blocks]

        def watched(copy: nn.Module, fake: Any) -> str | None:
            reads = Reads(copy, [copy.get_submodule(block) for block in blocks])
            with reads:
                known.call(copy, fake)
            return next(iter(reads.found), None)

        unknown = "whether it reads weights otherwise than by calling their modules"
        unknown += "; if it does, leave weights=device, offload=none and sharding=none"
        return tried(known.model, watched, known.short_example(2), unknown, None)


def is_others(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).partition(".")[0] != OURS


@final
class Reads(TorchDispatchMode):
    """Puts new weights into the modules of a copy, as those options do, and notes who reads the old ones, or weights of
    a block that doesn't compute."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.found: list[str] = []
        self.running: list[nn.Module] = []
        self.old: dict[int, str] = {}  # names, by the ids of the memory of what was there
        self.homes: dict[int, tuple[str, nn.Module]] = {}  # names and blocks, by those of what is there now
        self.kept: list[UntypedStorage] = []  # so that ids aren't used again
        self.names = {module: name for name, module in model.named_modules()}
        home = {module: block for block in blocks for module in block.modules()}
        twins: dict[Tensor, nn.Parameter] = {}
        for module, prefix in self.names.items():
            own = [*module.named_parameters(recurse=False, remove_duplicate=False)]
            for name, weight in own:
                if weight not in twins:
                    twins[weight] = nn.Parameter(torch.empty_like(weight), weight.requires_grad)
                    full = f"{prefix}.{name}".lstrip(".")
                    self.old[self.kept_id(weight)] = full
                    if module in home:
                        self.homes[self.kept_id(twins[weight])] = (full, home[module])
                setattr(module, name, twins[weight])
            if own:
                wanted = {name: twins[weight] for name, weight in own}
                module.register_forward_pre_hook(partial(self.check, prefix, wanted))
        for block in blocks:
            block.register_forward_pre_hook(self.begin, prepend=True)
            block.register_forward_hook(self.end)

    def kept_id(self, tensor: Tensor) -> int:
        self.kept.append(tensor.untyped_storage())
        return id(self.kept[-1])

    def begin(self, block: nn.Module, _: Any) -> None:
        self.running.append(block)

    def end(self, *_: Any) -> None:
        self.running.pop()

    def check(self, prefix: str, wanted: dict[str, nn.Parameter], module: nn.Module, _: Any) -> None:
        """The hook before a module's forward pass: whether it has its own weights, not those of a functional call."""
        now = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        for name, weight in wanted.items():
            if now.get(name) is not weight:
                self.found.append(f"{prefix} is called with another weight in the place of {prefix}.{name}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if current_node() is None:  # else gradients inside the forward pass
            for each in tree_leaves((args, kwargs)):
                if isinstance(each, Tensor):
                    self.note(id(each.untyped_storage()))
        return func(*args, **(kwargs or {}))

    def note(self, memory: int) -> None:
        if memory in self.old:
            self.found.append(f"the model reads {self.old[memory]} through another attribute than its module's")
        elif memory in self.homes and self.homes[memory][1] not in self.running:
            name, block = self.homes[memory]
            self.found.append(f"the model reads {name} while {self.names[block]} doesn't compute")
