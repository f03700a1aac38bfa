"""What modules keep besides parameters and buffers: whatever their `get_extra_state` returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

SUFFIX = "_extra_state"  # of its names in a state_dict


def extra_states(model: nn.Module) -> dict[str, Any]:
    """The extra state of each module that has some, by the module's name."""
    named = model.named_modules()
    return {name: module.get_extra_state() for name, module in named if has_extra_state(module)}


def has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def give(model: nn.Module, states: Mapping[str, Any]) -> nn.Module:
    """Give the modules of these names their extra state, as far as the model has such modules; returns the model."""
    for name, module in model.named_modules():
        if name in states and has_extra_state(module):
            module.set_extra_state(states[name])
    return model


@contextmanager
def hidden(model: nn.Module) -> Iterator[None]:
    """Inside it the model's state_dict has tensors alone, and such a one can be loaded: modules keep their extra
    state."""

    def leave_out(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        for name in [name for name in state if is_extra(name)]:
            state.pop(name)

    def add(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        state.update({f"{name}.{SUFFIX}".removeprefix("."): each for name, each in extra_states(model).items()})

    handles = [model.register_state_dict_post_hook(leave_out), model.register_load_state_dict_pre_hook(add)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == SUFFIX
