"""Where modules keep what a forward pass may change: buffers; tensors, arrays and containers in attributes; and what
all modules of a class share, in attributes of the class and in global names of its Python file.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from lowvram.compat.torch_modules import OF_MODULES, BatchNorm, is_plain_module, own_buffers
from lowvram.config.errors import Incompatible

LARGE_BYTES = 2**20  # tensors above are copied only if a forward pass has been seen to change them; arrays never
FIRST_LOOKS = 4  # at what classes and files hold
MOST_SHARED = 1000  # entries of a list or a dictionary of a class or a file that is looked at
DEEPEST = 3  # containers in containers that are looked into
OPAQUE = (nn.Module, Tensor, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, torch.Generator)
FIXED = ("torch", "lowvram", "builtins")  # packages whose classes and files stay as they are
PLAIN = (int, float, complex, str, bytes, tuple, torch.dtype, torch.device, type(None))


class Places:
    """Where a module and those in it may keep what a forward pass changes.

    BatchNorms of torch are left out: in training they write their running statistics without reading them, so that
    `StatisticsFrozen` is enough, which copies nothing. Not where the model uses the statistics otherwise, too.

    Args:
        earlier: places of the same module, found before a forward pass that may have added some.
    """

    def __init__(self, module: nn.Module, earlier: Places | None = None) -> None:
        modules = list(module.modules())
        self.norms = [each for each in modules if isinstance(each, BatchNorm) and is_batch_norm(each)]
        self._with_buffers = [each for each in modules if own_buffers(each) and not is_batch_norm(each)]
        self.with_values = [each for each in modules if not is_plain_module(each)]
        self.plain = [each for each in modules if is_plain_module(each)]
        self.is_watching_norms = False
        self.used_otherwise: set[int] = set() if earlier is None else earlier.used_otherwise  # ids of norms
        self._shared = list(shared_by({type(each) for each in self.with_values}))
        self.is_shared_changing = earlier is not None and earlier.is_shared_changing
        # Owners and names of tensors that are changed in place.
        self.written: set[tuple[int, Any]] = set() if earlier is None else earlier.written
        # Those that the first forward pass changed through `.data`, of which a tensor's version doesn't tell.
        self.unversioned: set[tuple[int, Any]] = set() if earlier is None else earlier.unversioned
        # As kernels change statistics, too.
        statistics = {(id(own_buffers(norm)), name) for norm in self.norms for name in own_buffers(norm)}
        self.written |= statistics
        self.unversioned |= statistics
        self.num_looks = 0 if earlier is None else earlier.num_looks

    @property
    def frozen_norms(self) -> list[BatchNorm]:
        """Those that are left out."""
        return [] if self.is_watching_norms else [each for each in self.norms if id(each) not in self.used_otherwise]

    @property
    def with_buffers(self) -> list[nn.Module]:
        watched = (
            self.norms if self.is_watching_norms else [each for each in self.norms if id(each) in self.used_otherwise]
        )
        return [*self._with_buffers, *watched]

    @property
    def shared(self) -> Sequence[tuple[str, MutableMapping[str, Any]]]:
        """What modules of a class share; none any more if the first forward passes have changed nothing there, as a
        file may have hundreds of names."""
        return self._shared if self.num_looks <= FIRST_LOOKS or self.is_shared_changing else ()

    def note_changed(self, names: Iterable[str]) -> None:
        """Note what a forward pass has changed, by the names for messages."""
        owners = {what for what, _ in self._shared}
        self.is_shared_changing |= any(name.rpartition(".")[0] in owners for name in names)


@final
class Slots(MutableMapping[Any, Any]):
    """A list, a deque or a tuple, by the number of each entry."""

    def __init__(self, container: Any) -> None:
        self.container = container

    def __getitem__(self, index: int) -> Any:
        if index >= len(self.container):
            raise KeyError(index)
        return self.container[index]

    def __setitem__(self, index: int, value: Any) -> None:
        if isinstance(self.container, tuple):
            raise Incompatible(
                "a tensor in a tuple that a module holds is changed in place by its forward pass, and can't be put back"
                " there when a block is computed again: keep it in a list, or choose ckpt=none and tile=none"
            )
        if index < len(self.container):
            self.container[index] = value

    def __delitem__(self, index: int) -> None:
        """Entries go with `OfContents`."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.container)))

    def __len__(self) -> int:
        return len(self.container)


@final
class ClassAttributes(MutableMapping[str, Any]):
    """The attributes of a class, but for those that it inherits."""

    def __init__(self, cls: type) -> None:
        self.cls = cls

    def __getitem__(self, name: str) -> Any:
        return vars(self.cls)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.cls, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self.cls, name)

    def __iter__(self) -> Iterator[str]:
        return iter(list(vars(self.cls)))

    def __len__(self) -> int:
        return len(vars(self.cls))


def shared_by(kinds: Iterable[type]) -> Iterator[tuple[str, MutableMapping[str, Any]]]:
    """The attributes of the classes of modules, but for torch's, and the global names of their Python files, each with
    a name for messages."""
    classes = dict.fromkeys(cls for kind in kinds for cls in kind.__mro__ if cls.__module__.split(".")[0] not in FIXED)
    yield from ((cls.__name__, ClassAttributes(cls)) for cls in classes)
    files = {name: sys.modules[name] for name in (cls.__module__ for cls in classes) if name in sys.modules}
    yield from ((name, vars(file)) for name, file in files.items())
    yield from ((name, ClassAttributes(value)) for file in files.values() for name, value in functions_in(file))


def functions_in(file: ModuleType) -> Iterator[tuple[str, type]]:
    """The autograd functions of a Python file: some leave something in their class for their backward pass."""
    values = list(vars(file).items())
    yield from ((name, each) for name, each in values if isinstance(each, type) and is_function_of(each, file))


def is_function_of(cls: type, file: ModuleType) -> bool:
    return issubclass(cls, torch.autograd.Function) and cls.__module__ == file.__name__


def is_looked_at(name: str) -> bool:
    """Whether a name of a class or a file is one of the user's: Python notes warnings in `__warningregistry__`."""
    return not name.startswith("__")


def is_shared_value(value: Any) -> bool:
    """Whether a value of a class or a file is looked at: a number, a text, a tensor that isn't large."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size() <= LARGE_BYTES
    return isinstance(value, PLAIN)


def is_shared_container(value: Any) -> bool:
    return isinstance(value, dict | list | set | deque) and len(value) <= MOST_SHARED


class Values(NamedTuple):
    """The attributes of a module, or what a class or a file shares."""

    what: str  # for messages
    owner: MutableMapping[str, Any]
    is_shared: bool = False
    is_of_torchs_own: bool = False  # a module of torch, which keeps notes under names with an underscore

    def now(self) -> dict[str, Any]:
        """The values that are looked at."""
        if not self.is_shared:
            return dict(self.owner)
        return {name: value for name, value in self.owner.items() if is_looked_at(name) and is_shared_value(value)}


def values_in(places: Places) -> list[Values]:
    """Also of torch's own modules: their forward pass changes none, but a model may, as `block.drop.p = 0.3` does."""
    plain = (Values(type(module).__name__, vars(module), is_of_torchs_own=True) for module in places.plain)
    return [*values_with_tensors(places), *plain]


def values_with_tensors(places: Places) -> list[Values]:
    """Those that may hold tensors."""
    own = (Values(type(module).__name__, vars(module)) for module in places.with_values)
    return [*own, *(Values(what, owner, is_shared=True) for what, owner in places.shared)]


def identity(owner: MutableMapping[Any, Any]) -> int:
    return id(owner.container if isinstance(owner, Slots) else owner)


def tensors_in(
    places: Places, containers: Iterable[tuple[str, Any]]
) -> Iterator[tuple[str, MutableMapping[Any, Any], Any, Tensor]]:
    """The buffers, and other tensors that attributes hold, also in these containers (`containers_in`), each with its
    owner and name there."""
    for what, container in containers:
        if not isinstance(container, set):
            owner = container if isinstance(container, dict) else Slots(container)
            for name, value in list(owner.items()):
                if isinstance(value, Tensor) and not value.is_inference():
                    yield what, owner, name, value
    for module in places.with_buffers:
        for name, buffer in own_buffers(module).items():
            if buffer is not None and not buffer.is_inference():
                yield f"{type(module).__name__}.{name}", own_buffers(module), name, buffer
    for values in values_with_tensors(places):
        for name, value in values.now().items():
            if isinstance(value, Tensor) and not value.is_inference():
                yield f"{values.what}.{name}", values.owner, name, value


def containers_in(places: Places) -> Iterator[tuple[str, Any]]:
    """The lists, dictionaries, sets, tuples and plain objects in attributes of modules, and in each other, each once.
    Not tuples of plain values."""
    seen: set[int] = set()
    for module in places.with_values:
        for name, value in vars(module).items():
            if name not in OF_MODULES:
                yield from containers(f"{type(module).__name__}.{name}", value, seen, DEEPEST)
    for what, owner in places.shared:
        for name, value in owner.items():
            if is_looked_at(name) and is_shared_container(value):
                yield from containers(f"{what}.{name}", value, seen, 1)


def containers(what: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    container = as_container(value)
    if container is None or id(container) in seen or not depth:
        return
    seen.add(id(container))
    yield what, container
    inner = container.values() if isinstance(container, dict) else container
    for each in list(inner):
        if not isinstance(each, PLAIN) or isinstance(each, tuple):
            yield from containers(what, each, seen, depth - 1)


def arrays_in(places: Places, containers: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The arrays of numpy that attributes hold, also in these containers, each once."""
    seen: set[int] = set()
    own = ((type(each).__name__, name, value) for each in places.with_values for name, value in vars(each).items())
    inner = (
        (what, "", value)
        for what, container in containers
        for value in (container.values() if isinstance(container, dict) else container)
    )
    for what, name, value in chain(own, inner):
        if is_array(value) and id(value) not in seen:
            seen.add(id(value))
            yield f"{what}.{name}".rstrip("."), value


def is_array(value: Any) -> bool:
    """Whether it is an array of numpy, which nobody may have imported."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def as_container(value: Any) -> Any:
    """The value, if its content can be replaced; the attributes of an object of a class written in Python; else
    None, as for torch's own objects: what FSDP notes in its states isn't the model's."""
    if isinstance(value, tuple):
        return None if all(isinstance(each, PLAIN) for each in value) else value
    if isinstance(value, (*PLAIN, *OPAQUE)):
        return None
    if isinstance(value, dict | list | set | deque):
        return value
    return None if type(value).__module__.partition(".")[0] == "torch" else getattr(value, "__dict__", None)


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module is a BatchNorm that computes as torch's do."""
    return isinstance(module, BatchNorm) and type(module).forward in (BatchNorm.forward, nn.SyncBatchNorm.forward)
