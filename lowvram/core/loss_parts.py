"""What a user's criterion consists of besides its code: modules and objects with values of their own, such as a running
centre, which a trial and an evaluation must leave as they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, final

from torch import Tensor, nn

from lowvram.compat.torch_autograd import version_of
from lowvram.core.changes import Look
from lowvram.core.generators import same_draws_afterwards
from lowvram.core.places import PLAIN, Places

DEEPEST = 4  # functions in objects in functions that are looked into
CONTAINERS = (list, tuple, set, dict)


class Holder(nn.Module):
    """Holds the modules and objects that a criterion calls, as attributes."""


def holder_of(criterion: Any, models: Iterable[nn.Module]) -> Holder:
    """What a criterion is or refers to: an object or its method, the variables that a function encloses, and what it
    calls by a global name.

    Args:
        models: those that are trained, which are no part of the criterion.
    """
    trained = {id(module) for model in models for module in model.modules()}
    found: dict[int, Any] = {}
    collect(criterion, found, trained, DEEPEST)
    holder = Holder()
    for index, each in enumerate(found.values()):
        setattr(holder, f"loss_{index}", each)
    return holder


def collect(value: Any, found: dict[int, Any], seen: set[int], depth: int) -> None:
    """Add to `found` the modules and the objects that `value` is or refers to, by their ids."""
    if id(value) in seen or not depth or isinstance(value, (*PLAIN, Tensor, type, ModuleType)):
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        found[id(value)] = value
    elif not isinstance(value, FunctionType | MethodType | partial | dict | list):
        if attributes_of(value) is None:
            return
        found[id(value)] = value
    for each in referred(value):
        collect(each, found, seen, depth - 1)


def referred(value: Any) -> Iterator[Any]:
    """What a function or an object refers to, one step away."""
    if isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # it is empty
                continue
        known = (value.__globals__.get(name) for name in value.__code__.co_names)
        yield from (each for each in known if is_called(each, value.__module__))
    elif isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value
    else:
        yield from (each for each in vars(value).values() if not isinstance(each, CONTAINERS))


def is_called(value: Any, file: str) -> bool:
    """Whether a global name stands for an object that can be called, or a function of the same Python file."""
    if isinstance(value, FunctionType):
        return value.__module__ == file
    return callable(value) and not isinstance(value, (type, ModuleType)) and attributes_of(value) is not None


def attributes_of(value: Any) -> dict[str, Any] | None:
    return getattr(value, "__dict__", None)


@contextmanager
def unchanged_afterwards(holder: Holder) -> Iterator[None]:
    """What is computed inside changes neither what the criterion holds nor what is drawn afterwards."""
    look = Look(Places(holder))
    try:
        with same_draws_afterwards(holder):
            yield
    finally:
        for change in look.changes():
            change.undo()


@final
class LossState:
    """The buffers that a criterion has changed since the run began, for snapshots."""

    def __init__(self, holder: Holder) -> None:
        self._holder = holder
        self._begun = {name: (buffer, version_of(buffer)) for name, buffer in holder.named_buffers()}

    def state(self) -> dict[str, Tensor]:
        now = self._holder.named_buffers()
        return {name: each.detach().clone() for name, each in now if self._is_changed(name, each)}

    def _is_changed(self, name: str, buffer: Tensor) -> bool:
        first, version = self._begun.get(name, (None, 0))
        return first is not buffer or version_of(buffer) != version

    def load(self, state: dict[str, Tensor]) -> None:
        """The inverse of `state`, in a criterion that was made again."""
        for name, value in state.items():
            owner, _, last = name.rpartition(".")
            module = self._holder.get_submodule(owner)
            old = getattr(module, last, None)
            setattr(module, last, value.to(old.device) if isinstance(old, Tensor) else value)
