"""A forward pass without memory and without values: on fake tensors, which have shapes alone. Code that reads a number
from one, as `item()` does, is given 1."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lowvram.compat.torch_fake import FakeTensorMode, GuessingFakeTensorMode
from lowvram.compat.torch_modes import without_dispatch_modes
from lowvram.compat.torch_trees import tree_map_only
from lowvram.config.texts import first_line
from lowvram.core.changes import Look
from lowvram.core.fake_cache import CachedOperators
from lowvram.core.generators import same_draws_afterwards
from lowvram.core.mesh import tell
from lowvram.core.model_copies import copied
from lowvram.core.places import Places

T = TypeVar("T")
UNTRIED = set[tuple[type, str]]()  # models, and questions about them of which the user knows that nobody has answered
CACHED = type(lru_cache(len))


def fake_pass(model: nn.Module, run: Callable[[nn.Module, Any], T], inputs: Any, *, guesses: bool = True) -> T:
    """Run a copy of the model, which is in training mode.

    Args:
        model: on any device; isn't changed.
        run: is given the copy and its inputs.
        inputs: on the CPU.
        guesses: whether code that reads a number from a tensor is given 1. Else that raises an error: where a block
            must not look at all samples at once, a way that depends on them would hide it.
    """
    misses = {cached: cached.cache_info().misses for cached in caches_of(model)}
    try:
        alone = same_draws_afterwards(model)
        with (
            without_dispatch_modes(),
            torch.device("cpu"),  # whatever torch.set_default_device says
            alone,
            (GuessingFakeTensorMode if guesses else FakeTensorMode)(allow_non_fake_inputs=True) as mode,
            CachedOperators(mode),
            unchanged(model),
        ):
            return run(without_memory(model), tree_map_only(Tensor, mode.from_tensor, inputs))
    finally:
        for cached, before in misses.items():
            if cached.cache_info().misses > before:  # else it has nothing from this pass
                cached.cache_clear()


def tried(model: nn.Module, run: Callable[[nn.Module, Any], T], inputs: Any, unknown: str, otherwise: T) -> T:
    """What `run` finds in a `fake_pass`; if the model can't run so, `otherwise`, which is said once of each class.

    Args:
        unknown: what nobody knows then, and what the user can do about it.
    """
    try:
        return fake_pass(model, run, inputs)
    except Exception as error:
        if (type(model), unknown) not in UNTRIED:
            UNTRIED.add((type(model), unknown))
            tell(
                f"note: this model can't be tried without memory, so that nobody knows {unknown} ({first_line(error)})"
            )
        return otherwise


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Afterwards the modules hold what they held: a hook of the copy may write into the model itself."""
    look = Look(Places(model), with_tensors=False)
    try:
        yield
    finally:
        for change in look.changes():
            change.undo()


def without_memory(model: nn.Module) -> nn.Module:
    """A copy in training mode with new, empty tensors. Call it under a fake mode: they then have no memory."""
    return copied(model, "cpu", with_constants=False).train()


def caches_of(model: nn.Module) -> set[Any]:
    """The functions of the model's code that remember results from call to call (`functools.lru_cache`). BEiT of
    transformers does so with tensors: a fake one would come back in a real pass."""
    kinds = {type(module) for module in model.modules()}
    files = {sys.modules.get(kind.__module__) for kind in kinds} - {None}
    return {cached for owner in kinds | files for each in list(vars(owner).values()) for cached in caches_in(each)}


def caches_in(member: Any) -> Iterator[Any]:
    """Of a member of a module or a class: itself, or what it wraps. Nothing else of foreign objects is looked at."""
    function = member.__func__ if isinstance(member, staticmethod | classmethod) else member
    if isinstance(function, CACHED):
        yield function
    elif isinstance(function, FunctionType):
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # nothing was assigned to it yet
                if isinstance(cell.cell_contents, CACHED):
                    yield cell.cell_contents
