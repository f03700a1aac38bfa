"""Copies of models of any code, which hold nothing of the model that they are copies of.

Python's deepcopy leaves functions as they are, and so what their closures hold: `self.f = lambda x: x * self.scale`
would compute with the scale of the first model, which nobody trains.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar
from weakref import CallableProxyType, ProxyType, ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lowvram.compat.torch_autograd import give_hooks, hooks_of_tensor
from lowvram.compat.torch_modes import without_dispatch_modes
from lowvram.config.texts import first_line
from lowvram.core.references import (
    Reference,
    Unfollowed,
    aliases,
    inside,
    is_empty,
    references,
    references_from,
)
from lowvram.core.shared_memory import laid_out_as

Model = TypeVar("Model", bound=nn.Module)
CALLS = (FunctionType, MethodType, BuiltinFunctionType)
WITHOUT_STATE = (*CALLS, ref)  # what holds others, and isn't anybody's own


def copied(model: Model, device: str, with_constants: bool = True) -> Model:
    """A copy of a model, of any code, with new, empty tensors on a device. Tensors that are tied, or share memory, do
    so again.

    Args:
        with_constants: copy tensors that are neither parameters nor buffers as any other; else they keep their values,
            also under a fake mode.

    Raises:
        Unfollowed: the copy would hold something of the model, or can't be made; it names the attribute.
    """
    held = list(references(model))
    registered = [*model.parameters(), *model.buffers()]
    # torch itself copies no tensor that autograd has computed, such as the weight of an old `weight_norm`.
    others = {each.value: None for each in held if isinstance(each.value, Tensor)}
    others = [each for each in others if not isinstance(each, nn.Parameter) and each not in {*registered}]
    computed = [each for each in others if each.grad_fn is not None]
    tensors = [each for each in [*registered, *computed, *aliases(model)] if not is_lazy(each)]

    def empty(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

    memo = {id(each.value): each.value for each in held if isinstance(each.value, ModuleType)}
    # Nor does torch copy its generators.
    generators = [each.value for each in held if isinstance(each.value, torch.Generator)]
    memo |= {id(each): each.clone_state() for each in generators}
    if not with_constants:
        with without_dispatch_modes():
            memo |= {id(each): each.detach().clone() for each in others}
    new = laid_out_as(tensors, empty)
    copy = following(model, held, memo | {id(old): tensor for old, tensor in new.items()}, new)
    check_apart(copy, held)
    return copy


def following(model: Model, held: list[Reference], memo: dict[int, Any], new: dict[Tensor, Tensor]) -> Model:
    """The copy, its functions with closures of their own.

    Args:
        memo: as deepcopy takes it.
        new: the tensors that stand for others; they take over attributes and hooks.
    """
    functions = functions_that_hold(held)
    cells: dict[int, CellType] = {}
    memo |= {id(function): with_own_cells(function, cells) for function in functions}
    refuse_proxies(held)
    before = dict(memo)
    try:
        copy = deepcopy(model, memo)
        for function in functions:
            for cell in function.__closure__ or ():
                if not is_empty(cell):
                    cells[id(cell)].cell_contents = deepcopy(cell.cell_contents, memo)
            twin = memo[id(function)]
            twin.__defaults__, twin.__kwdefaults__ = deepcopy((function.__defaults__, function.__kwdefaults__), memo)
            vars(twin).update(deepcopy(vars(function), memo))
        for old, tensor in new.items():
            own = {name: each for name, each in vars(old).items() if name not in vars(tensor)}  # not a fake tensor's
            vars(tensor).update(deepcopy(own, memo))
            give_hooks(tensor, *deepcopy(hooks_of_tensor(old), memo))
    except Exception as error:
        raise Unfollowed(
            f"{culprit(model, before)} can't be copied ({type(error).__name__}: {first_line(error)})"
        ) from None
    for _, value, put in list(references(copy)):
        if isinstance(value, ref) and id(value()) in memo and put is not None:
            put(ref(memo[id(value())]))
    return copy


def functions_that_hold(held: list[Reference]) -> list[FunctionType]:
    """The functions in whose closures, default arguments or attributes there is something that the model holds, too."""
    own = {id(each.value) for each in held_without_functions(held) if not isinstance(each.value, WITHOUT_STATE)}
    functions = {id(each.value): each.value for each in held if isinstance(each.value, FunctionType)}

    def reaches(function: FunctionType) -> bool:
        starts = inside(Reference("", function, None))
        inner = references_from(starts, ends=lambda value: isinstance(value, ref))
        return any(id(each.value) in own for each in inner)

    return [function for function in functions.values() if reaches(function)]


def held_without_functions(held: list[Reference]) -> Iterable[Reference]:
    """What a model holds otherwise than through functions."""
    return references_from(held[:1], ends=lambda value: isinstance(value, (FunctionType, ref)))


def with_own_cells(function: FunctionType, cells: dict[int, CellType]) -> FunctionType:
    """A function of the same code, with new, empty variables in its closure.

    Args:
        cells: the new variables, by the ids of the old ones; functions may share some.
    """
    closure = tuple(cells.setdefault(id(cell), CellType()) for cell in function.__closure__ or ())
    twin = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, closure)
    twin.__qualname__, twin.__module__, twin.__doc__ = function.__qualname__, function.__module__, function.__doc__
    return twin


def refuse_proxies(held: list[Reference]) -> None:
    """Raises Unfollowed for a proxy, of which deepcopy would make a second copy of what it stands for."""
    for each in held:
        if type(each.value) in (ProxyType, CallableProxyType):
            raise Unfollowed(f"{each.path}, a weak proxy, can't be copied: hold a weakref.ref")


def culprit(model: nn.Module, memo: dict[int, Any]) -> str:
    """The first attribute of a module that deepcopy can't copy, for messages."""
    for prefix, module in model.named_modules():
        for each in inside(Reference(prefix, module, None)):
            if not isinstance(each.value, nn.Module):
                try:
                    deepcopy(each.value, dict(memo))
                except Exception:  # of code that we don't know
                    return each.path
    return type(model).__name__


def check_apart(copy: nn.Module, held: list[Reference]) -> None:
    """Raises Unfollowed if the copy holds a module or a tensor of what it was copied from, or something of its own that
    holds one."""
    originals = {id(each.value): each.path for each in held if isinstance(each.value, nn.Module | nn.Parameter)}
    for path, value, _ in references(copy):
        if id(value) in originals:
            raise Unfollowed(f"{path} refers to {originals[id(value)] or 'the model'} in a way that can't be copied")
