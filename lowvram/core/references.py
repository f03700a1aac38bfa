"""What a model holds, by whichever way: attributes, lists and other containers, closures, default arguments, partial
calls, methods, hooks of modules and of parameters, plain objects, weak references.

Where a model is copied, or its tensors are replaced, all of it must follow: else the model computes with what another
one trains.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, final
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lowvram.compat.torch_autograd import give_hooks, hooks_of_tensor
from lowvram.compat.torch_fake import FakeTensorMode
from lowvram.compat.torch_modes import is_traceable_wrapper_subclass
from lowvram.compat.torch_modules import OF_MODULES

PLAIN = (int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device, torch.Size)
IMMUTABLE = (tuple, MethodType, ref)  # replaced as a whole by each way that leads to it
Put = Callable[[Any], None]


class Reference(NamedTuple):
    """One way by which a model holds something."""

    path: str  # for messages: "blocks.0.scales[2]"
    value: Any
    put: Put | None  # puts another value in its place; None where that isn't possible


@final
class Unfollowed(ValueError):
    """A reference that can't be moved along with what it refers to."""


def references(model: nn.Module) -> Iterator[Reference]:
    """Everything that a model holds, each object by every way that leads to it."""
    return references_from([Reference("", model, None)])


def references_from(starts: Iterable[Reference], ends: Callable[[Any], bool] = lambda _: False) -> Iterator[Reference]:
    """These references, and those that begin at them.

    Args:
        ends: whether a value isn't looked into.
    """
    seen: dict[int, Any] = {}  # kept, so that ids aren't used again
    waiting = deque(starts)
    while waiting:
        reference = waiting.popleft()
        yield reference
        is_new = id(reference.value) not in seen or isinstance(reference.value, IMMUTABLE)
        if is_new and not ends(reference.value):
            seen[id(reference.value)] = reference.value
            waiting.extend(each for each in inside(reference) if not isinstance(each.value, PLAIN))


def inside(reference: Reference) -> Iterator[Reference]:
    """What the object of a reference holds itself."""
    path, value, put = reference
    match value:
        case nn.Module():
            yield from of_module(path, value)
        case dict():
            yield from of_dictionary(path, value)
        case list() | deque():
            for index, each in enumerate(value):
                yield Reference(f"{path}[{index}]", each, partial(value.__setitem__, index))
        case tuple():
            entries = list(value)
            for index, each in enumerate(value):
                yield Reference(
                    f"{path}[{index}]", each, put and partial(put_in_tuple, type(value), entries, index, put)
                )
        case set():
            for each in list(value):
                yield Reference(f"an entry of {path}", each, partial(put_in_set, value, each))
        case FunctionType():
            yield from of_function(path, value)
        case partial():
            yield from of_partial(path, value)
        case MethodType():
            yield Reference(path, value.__self__, put and (lambda new: put(MethodType(value.__func__, new))))
        case BuiltinFunctionType():
            yield Reference(path, value.__self__, None)
        case ref():
            if (alive := value()) is not None:
                yield Reference(path, alive, put and (lambda new: put(ref(new))))
        case ModuleType():
            pass
        case _:
            if isinstance(value, Tensor):
                for hooks in hooks_of_tensor(value):
                    yield Reference(f"a hook of {path}", hooks, None)
            yield from of_object(path, value)


def of_module(path: str, module: nn.Module) -> Iterator[Reference]:
    for name, value in vars(module).items():
        if name not in OF_MODULES:
            yield Reference(f"{path}.{name}".lstrip("."), value, partial(vars(module).__setitem__, name))
        elif isinstance(value, dict):
            of_hooks = f"a hook of {path or 'the model'}"
            is_named = name in ("_modules", "_parameters", "_buffers")
            for key, each in list(value.items()):
                where = f"{path}.{key}".lstrip(".") if is_named else of_hooks
                yield Reference(where, each, partial(value.__setitem__, key))


def of_dictionary(path: str, value: dict[Any, Any]) -> Iterator[Reference]:
    for key, each in list(value.items()):
        if not isinstance(key, PLAIN):
            yield Reference(f"a key of {path}", key, None)
        yield Reference(
            f"{path}[{key!r}]" if isinstance(key, str | int) else path, each, partial(value.__setitem__, key)
        )


def of_function(path: str, function: FunctionType) -> Iterator[Reference]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if not is_empty(cell):
            yield Reference(f"{path} ({name})", cell.cell_contents, partial(setattr, cell, "cell_contents"))
    yield Reference(path, function.__defaults__, partial(setattr, function, "__defaults__"))
    yield Reference(path, function.__kwdefaults__, None)
    yield Reference(path, vars(function), None)


def of_partial(path: str, value: partial[Any]) -> Iterator[Reference]:
    def put(args: tuple[Any, ...]) -> None:
        value.__setstate__((value.func, args, value.keywords, vars(value)))  # pyright: ignore[reportAttributeAccessIssue]

    def put_function(function: Any) -> None:
        value.__setstate__((function, value.args, value.keywords, vars(value)))  # pyright: ignore[reportAttributeAccessIssue]

    yield Reference(path, value.func, put_function)
    yield Reference(path, value.args, put)
    yield Reference(path, value.keywords, None)


def of_object(path: str, value: Any) -> Iterator[Reference]:
    """The attributes of an object of a class written in Python, but for the mode that a fake tensor belongs to."""
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        for name, each in list(attributes.items()):
            if not isinstance(each, FakeTensorMode):
                yield Reference(f"{path}.{name}", each, partial(attributes.__setitem__, name))
    if type(value).__module__.partition(".")[0] not in ("torch", "numpy", "builtins"):
        for name in {name for kind in type(value).__mro__ for name in names_of_slots(kind)}:
            if (each := getattr(value, name, None)) is not None:
                yield Reference(f"{path}.{name}", each, partial(object.__setattr__, value, name))


def names_of_slots(kind: type) -> set[str]:
    slots = vars(kind).get("__slots__", ())
    return {slots} if isinstance(slots, str) else {*slots} - {"__dict__", "__weakref__"}


def is_empty(cell: CellType) -> bool:
    """Whether nothing has been assigned to a variable yet."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def put_in_tuple(kind: Any, entries: list[Any], index: int, put: Put, new: Any) -> None:
    """
    Args:
        entries: what the tuple holds by now.
        put: puts another tuple in its place.
    """
    entries[index] = new
    put(tuple.__new__(kind, entries))


def put_in_set(container: set[Any], old: Any, new: Any) -> None:
    container.discard(old)
    container.add(new)


def replace_tensors(model: nn.Module, new: Mapping[Tensor, Tensor]) -> None:
    """Put other tensors in the place of a model's own, everywhere where it holds these. They take over their attributes
    and hooks.

    Raises:
        Unfollowed: one is held where nothing can be put.
    """
    if not new:
        return
    places = {id(old): tensor for old, tensor in new.items()}
    for path, value, put in list(references(model)):
        if isinstance(value, Tensor) and id(value) in places:
            if put is None:
                raise Unfollowed(f"{path} holds a weight where it can't be replaced")
            put(places[id(value)])
    for old, tensor in new.items():
        if tensor is not old:
            vars(tensor).update({name: each for name, each in vars(old).items() if name not in vars(tensor)})
            give_hooks(tensor, *hooks_of_tensor(old))


def aliases(model: nn.Module) -> dict[Tensor, str]:
    """Tensors that a model holds beside its parameters and buffers, in the memory of one of these, and where: what
    `self.weight.detach()` returns."""
    own = dict.fromkeys([*model.parameters(), *model.buffers()])
    memory = {id(tensor.untyped_storage()) for tensor in own if has_storage(tensor)}
    found: dict[Tensor, str] = {}
    for path, value, _ in references(model):
        if not isinstance(value, Tensor) or value in own or value.grad_fn is not None or not has_storage(value):
            continue
        if id(value.untyped_storage()) in memory:
            found.setdefault(value, path)
    return found


def has_storage(tensor: Tensor) -> bool:
    return not is_lazy(tensor) and not is_traceable_wrapper_subclass(tensor)
