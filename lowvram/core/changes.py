"""What a forward pass changes beside what it returns: buffers, tensors and values that modules hold.

Two looks at the same modules, before and after, tell it. Each change can be undone for a while, so that the forward
pass can run a second time as it ran first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from lowvram.compat.torch_autograd import version_of
from lowvram.compat.torch_modules import BatchNorm, is_plain_module, own_buffers
from lowvram.config.errors import Incompatible
from lowvram.core.knob import Kind
from lowvram.core.ledger import announce

MISSING: Any = object()
LARGE_BYTES = 2**20  # tensors above are copied only if a forward pass has been seen to change them in place
DEEPEST = 3  # containers in containers that are looked into
OF_MODULES = frozenset(vars(nn.Module()))  # nn.Module's own attributes
OPAQUE = (nn.Module, Tensor, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, torch.Generator)
PLAIN = (int, float, complex, str, bytes, tuple, torch.dtype, torch.device, type(None))


class Change(ABC):
    """One difference between the two looks."""

    what: str  # as a user knows it: "Ema.count"

    @abstractmethod
    def undo(self) -> None:
        """Have it as it was before the forward pass. Keeps what is there now."""

    @abstractmethod
    def redo(self) -> None:
        """The inverse of `undo`: what is there meanwhile is dropped."""


@final
class OfEntry(Change):
    """An attribute, a buffer or an entry of a dictionary holds something else than before.

    Args:
        is_copied: the value is a tensor that the forward pass changed in place, copied before.
    """

    def __init__(
        self, what: str, owner: MutableMapping[Any, Any], name: Any, before: Any, *, is_copied: bool = False
    ) -> None:
        self.what, self.owner, self.name, self.before, self.is_copied = what, owner, name, before, is_copied
        self.now: Any = MISSING

    def undo(self) -> None:
        self.now = self.owner.get(self.name, MISSING)
        # A copy: it may be undone once more, and the graph of a recomputation may keep what it is given.
        self.put(copied(self.before) if self.is_copied else self.before)

    def redo(self) -> None:
        self.put(self.now)
        self.now = MISSING

    def put(self, value: Any) -> None:
        if value is MISSING:
            self.owner.pop(self.name, None)
        else:
            self.owner[self.name] = value


@final
class OfContents(Change):
    """A list, a set or a dictionary has another content than before."""

    def __init__(self, what: str, container: Any, before: Any) -> None:
        self.what, self.container, self.before = what, container, before
        self.now: Any = MISSING

    def undo(self) -> None:
        self.now = contents_of(self.container)
        fill(self.container, self.before)

    def redo(self) -> None:
        fill(self.container, self.now)
        self.now = MISSING


class Held(NamedTuple):
    """A tensor that a module holds, at the first look."""

    what: str
    owner: MutableMapping[Any, Any]
    name: Any
    tensor: Tensor
    version: int
    copy: Tensor | None


class Places:
    """Where a module and those in it may keep what a forward pass changes.

    BatchNorms of torch are left out: in training they write their running statistics without reading them, so that
    `StatisticsFrozen` is enough, which copies nothing.

    Args:
        earlier: places of the same module, found before a forward pass that may have added some.
    """

    def __init__(self, module: nn.Module, earlier: Places | None = None) -> None:
        modules = list(module.modules())
        self.norms = [each for each in modules if isinstance(each, BatchNorm) and is_batch_norm(each)]
        self.with_buffers = [each for each in modules if own_buffers(each) and not is_batch_norm(each)]
        self.with_values = [each for each in modules if not is_plain_module(each)]
        # Owners and names of tensors that are changed in place.
        self.written: set[tuple[int, Any]] = set() if earlier is None else earlier.written
        # Those that the first forward pass changed through `.data`, of which a tensor's version doesn't tell.
        self.unversioned: set[tuple[int, Any]] = set() if earlier is None else earlier.unversioned
        self.num_looks = 0 if earlier is None else earlier.num_looks

    def look(self) -> Look:
        """A first look."""
        self.num_looks += 1
        return Look(self)


@final
class Look:
    """What there is before a forward pass.

    Args:
        with_tensors: look at tensors that may be changed in place; else at which ones there are.
    """

    def __init__(self, places: Places, with_tensors: bool = True) -> None:
        self.places = places
        self.held = [self.hold(*place) for place in tensors_in(places)] if with_tensors else []
        self.values = [(module, dict(vars(module))) for module in places.with_values]
        self.contents = [(what, each, contents_of(each)) for what, each in containers_in(places)]

    def hold(self, what: str, owner: MutableMapping[Any, Any], name: Any, tensor: Tensor) -> Held:
        is_small = tensor.numel() * tensor.element_size() <= LARGE_BYTES
        is_copied = is_small or self.places.num_looks == 1 or (identity(owner), name) in self.places.written
        copy = copied(tensor) if is_copied else None
        return Held(what, owner, name, tensor, version_of(tensor), copy)

    def changes(self) -> list[Change]:
        """What has changed since.

        Raises:
            Incompatible: a large tensor was changed in place for the first time, so that there is no copy of it.
        """
        tensors = [change for held in self.held if (change := self.change_of(held)) is not None]
        held = {id(each.tensor) for each in self.held}
        values = [change for module, before in self.values for change in changed_values(module, before, held)]
        contents = [OfContents(*look) for look in self.contents if not are_same(*look[1:])]
        return [*values, *contents, *tensors]  # tensors last: what a list held before may have been changed in place

    def change_of(self, held: Held) -> Change | None:
        place = (identity(held.owner), held.name)
        if self.places.num_looks == 1 and held.copy is not None and differ(held.copy, held.tensor):
            self.places.unversioned.add(place)
        if version_of(held.tensor) != held.version or place in self.places.unversioned:
            self.places.written.add(place)
            if held.copy is None:
                raise Incompatible(
                    f"{held.what} was changed in place by a forward pass, which none did before, and it is too large to"
                    " be copied each time: what computes a forward pass again (ckpt, tile) can't be used with it"
                )
            return OfEntry(held.what, held.owner, held.name, held.copy, is_copied=True)
        is_replaced = held.owner.get(held.name, MISSING) is not held.tensor
        return OfEntry(held.what, held.owner, held.name, held.tensor) if is_replaced else None


@final
class Slots(MutableMapping[Any, Any]):
    """A list or a deque, by the number of each entry."""

    def __init__(self, container: Any) -> None:
        self.container = container

    def __getitem__(self, index: int) -> Any:
        if index >= len(self.container):
            raise KeyError(index)
        return self.container[index]

    def __setitem__(self, index: int, value: Any) -> None:
        if index < len(self.container):
            self.container[index] = value

    def __delitem__(self, index: int) -> None:
        """Entries go with `OfContents`."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.container)))

    def __len__(self) -> int:
        return len(self.container)


def identity(owner: MutableMapping[Any, Any]) -> int:
    return id(owner.container if isinstance(owner, Slots) else owner)


def tensors_in(places: Places) -> Iterator[tuple[str, MutableMapping[Any, Any], Any, Tensor]]:
    """The buffers, and other tensors that attributes hold, also in lists, dictionaries and plain objects, each with its
    owner and name there."""
    for what, container in containers_in(places):
        if not isinstance(container, set):
            owner = container if isinstance(container, dict) else Slots(container)
            for name, value in list(owner.items()):
                if isinstance(value, Tensor) and not value.is_inference():
                    yield what, owner, name, value
    for module in places.with_buffers:
        for name, buffer in own_buffers(module).items():
            if buffer is not None and not buffer.is_inference():
                yield f"{type(module).__name__}.{name}", own_buffers(module), name, buffer
    for module in places.with_values:
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and not value.is_inference():
                yield f"{type(module).__name__}.{name}", vars(module), name, value


def containers_in(places: Places) -> Iterator[tuple[str, Any]]:
    """The lists, dictionaries, sets and plain objects in attributes of modules, and in each other, each once."""
    seen: set[int] = set()
    for module in places.with_values:
        for name, value in vars(module).items():
            if name not in OF_MODULES:
                yield from containers(f"{type(module).__name__}.{name}", value, seen, DEEPEST)


def containers(what: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    container = as_container(value)
    if container is None or id(container) in seen or not depth:
        return
    seen.add(id(container))
    yield what, container
    inner = container.values() if isinstance(container, dict) else container
    for each in list(inner):
        if not isinstance(each, PLAIN):
            yield from containers(what, each, seen, depth - 1)


def as_container(value: Any) -> Any:
    """The value, if its content can be replaced; the attributes of an object of a class written in Python; else
    None, as for torch's own objects: what FSDP notes in its states isn't the model's."""
    if isinstance(value, (*PLAIN, *OPAQUE)):
        return None
    if isinstance(value, dict | list | set | deque):
        return value
    return None if type(value).__module__.partition(".")[0] == "torch" else getattr(value, "__dict__", None)


def contents_of(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def fill(container: Any, contents: Any) -> None:
    container.clear()
    if isinstance(container, dict | set):
        container.update(contents)
    else:
        container.extend(contents)


def are_same(container: Any, before: Any) -> bool:
    """Whether a container holds the very objects that it held, or equal numbers and texts."""
    if len(container) != len(before):
        return False
    if isinstance(container, dict):
        return all(is_same(container.get(name, MISSING), value) for name, value in before.items())
    return all(map(is_same, container, before))


def is_same(now: Any, before: Any) -> bool:
    return now is before or (isinstance(now, PLAIN) and type(now) is type(before) and is_equal(now, before))


def is_equal(now: Any, before: Any) -> bool:
    if isinstance(now, tuple):
        return len(now) == len(before) and all(map(is_same, now, before))
    return now == before


def changed_values(module: nn.Module, before: dict[str, Any], held: set[int]) -> Iterator[Change]:
    """The attributes of a module that aren't what they were, but for the tensors that `Held` looks at."""
    now = vars(module)
    for name in now.keys() | before.keys():
        was = before.get(name, MISSING)
        if not is_same(now.get(name, MISSING), was) and id(was) not in held:
            yield OfEntry(f"{type(module).__name__}.{name}", now, name, was)


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module is a BatchNorm that computes as torch's do."""
    return isinstance(module, BatchNorm) and type(module).forward in (BatchNorm.forward, nn.SyncBatchNorm.forward)


class StatisticsFrozen:
    """Inside it a forward pass doesn't change BatchNorm's running statistics. Without it, recomputation would update
    them a second time (pytorch#96136). Can be entered again, as a second backward pass does."""

    def __init__(self, norms: list[BatchNorm]) -> None:
        self.norms = norms
        self.held: list[tuple[float | None, Tensor | None]] = []

    def __enter__(self) -> None:
        self.held = [(norm.momentum, _copy(norm.num_batches_tracked)) for norm in self.norms]
        for norm in self.norms:
            norm.momentum = 0.0

    def __exit__(self, *_: object) -> None:
        for norm, (momentum, num_batches) in zip(self.norms, self.held, strict=True):
            norm.momentum = momentum
            if num_batches is not None and norm.num_batches_tracked is not None:
                norm.num_batches_tracked.copy_(num_batches)


def differ(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have other values; False where that can't be told, as without values."""
    with suppress(RuntimeError):  # NotImplementedError is one
        return not torch.equal(one, other) and not bool(((one == other) | (one.isnan() & other.isnan())).all())
    return False


def copied(tensor: Tensor) -> Tensor:
    """A copy without a graph, which ledgers and plans don't take for an activation."""
    return announce(tensor.detach().clone(), Kind.OTHER)


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else copied(tensor)
