"""What a forward pass changes beside what it returns: buffers, tensors and values that modules hold.

Two looks at the same modules, before and after, tell it. Each change can be undone for a while, so that the forward
pass can run a second time as it ran first.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from operator import is_
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from lowvram.compat.torch_autograd import version_of
from lowvram.compat.torch_modules import BatchNorm
from lowvram.config.errors import Incompatible
from lowvram.core.kind import Kind
from lowvram.core.ledger import announce
from lowvram.core.places import (
    LARGE_BYTES,
    PLAIN,
    Places,
    Values,
    arrays_in,
    containers_in,
    identity,
    tensors_in,
    values_in,
)

MISSING: Any = object()
AGAIN = "compute a forward pass again, or undo what it changed (ckpt, tile, compile=torchscript, stepping=zeroth_order)"


class Change(ABC):
    """One difference between the two looks.

    Args:
        what: as a user knows it: "Ema.count".
        before: what there was before the forward pass.
    """

    def __init__(self, what: str, before: Any) -> None:
        self.what, self.before = what, before
        self.now: Any = MISSING

    def undo(self) -> None:
        """Have it as it was before the forward pass. Keeps what is there now."""
        self.now = self.read()
        self.write(self.before)

    def redo(self) -> None:
        """The inverse of `undo`: what is there meanwhile is dropped."""
        self.write(self.now)
        self.now = MISSING

    @abstractmethod
    def read(self) -> Any:
        """What is there now."""

    @abstractmethod
    def write(self, value: Any) -> None:
        """The inverse of `read`."""


@final
class OfEntry(Change):
    """An attribute, a buffer or an entry of a dictionary holds something else than before.

    Args:
        is_copied: the value is a tensor that the forward pass changed in place, copied before.
    """

    def __init__(
        self, what: str, owner: MutableMapping[Any, Any], name: Any, before: Any, *, is_copied: bool = False
    ) -> None:
        super().__init__(what, before)
        self.owner, self.name, self.is_copied = owner, name, is_copied

    def undo(self) -> None:
        self.now = self.read()
        # A copy: it may be undone once more, and the graph of a recomputation may keep what it is given.
        self.write(copied(self.before) if self.is_copied else self.before)

    def is_different(self) -> bool:
        """Whether there is another value now, also in a tensor that was changed in place."""
        now = self.read()
        return differ(self.before, now) if self.is_copied and isinstance(now, Tensor) else now is not self.before

    def read(self) -> Any:
        return self.owner.get(self.name, MISSING)

    def write(self, value: Any) -> None:
        if value is MISSING:
            self.owner.pop(self.name, None)
        else:
            self.owner[self.name] = value


@final
class OfContents(Change):
    """A list, a set or a dictionary has another content than before."""

    def __init__(self, what: str, container: Any, before: Any) -> None:
        super().__init__(what, before)
        self.container = container

    def read(self) -> Any:
        return contents_of(self.container)

    def write(self, value: Any) -> None:
        fill(self.container, value)


@final
class OfArray(Change):
    """An array of numpy has other numbers than before."""

    def __init__(self, what: str, array: Any, before: Any) -> None:
        super().__init__(what, before)
        self.array = array

    def read(self) -> Any:
        return self.array.copy()

    def write(self, value: Any) -> None:
        self.array[...] = value


@final
class OfLargeArray(Change):
    """An array of numpy that is too large to be copied has other numbers than before."""

    def read(self) -> Any:
        """Raises Incompatible."""
        raise Incompatible(
            f"{self.what}, an array of numpy, is changed in place by a forward pass, and it is too large to be copied"
            f" each time: make it a buffer, or leave the options that {AGAIN}"
        )

    def write(self, value: Any) -> None:
        """Nothing was undone."""


class Held(NamedTuple):
    """A tensor that a module holds, at the first look."""

    what: str
    owner: MutableMapping[Any, Any]
    name: Any
    tensor: Tensor
    version: int
    copy: Tensor | None


@final
class Look:
    """What there is before a forward pass: a first look at the places.

    Args:
        with_tensors: look at tensors that may be changed in place; else at which ones there are.
    """

    def __init__(self, places: Places, with_tensors: bool = True) -> None:
        self.places = places
        places.num_looks += 1
        containers = list(containers_in(places))
        self.held = [self.hold(*place) for place in tensors_in(places, containers)] if with_tensors else []
        self.values = [(values, values.now()) for values in values_in(places)]
        self.contents = [(what, each, contents_of(each)) for what, each in containers]
        arrays = list(arrays_in(places, containers))
        self.arrays = [(what, each, each.copy()) for what, each in arrays if each.nbytes <= LARGE_BYTES]
        large = arrays if places.num_looks == 1 else []
        self.large = [(what, each, checksum(each)) for what, each in large if each.nbytes > LARGE_BYTES]
        self.own: dict[int, Change] = {}  # what the forward pass has changed, by the place among `held`
        self.own_besides: list[Change] = []  # and of what isn't held

    def hold(self, what: str, owner: MutableMapping[Any, Any], name: Any, tensor: Tensor) -> Held:
        is_small = tensor.numel() * tensor.element_size() <= LARGE_BYTES
        is_copied = is_small or self.places.num_looks == 1 or (identity(owner), name) in self.places.written
        copy = copied(tensor) if is_copied else None
        return Held(what, owner, name, tensor, version_of(tensor), copy)

    def changes(self) -> list[Change]:
        """What the forward pass has changed. Afterwards only copies of what it has changed are kept.

        Raises:
            Incompatible: a large tensor was changed in place for the first time, so that there is no copy of it.
        """
        found = {place: self.change_of(held) for place, held in enumerate(self.held)}
        self.own = {place: change for place, change in found.items() if change is not None}
        self.held = [held._replace(version=version_of(held.tensor), copy=None) for held in self.held]
        self.own_besides = self.besides_tensors()
        changes = [*self.own_besides, *self.own.values()]
        self.places.note_changed(change.what for change in changes)
        return changes

    def besides_tensors(self) -> list[Change]:
        held = {id(each.tensor) for each in self.held}
        values = [change for look in self.values for change in changed_values(*look, held)]
        contents = [OfContents(*look) for look in self.contents if not are_same(*look[1:])]
        arrays = [OfArray(*look) for look in self.arrays if not same_numbers(*look[1:])]
        large = [OfLargeArray(what, None) for what, each, before in self.large if checksum(each) != before]
        return [*values, *contents, *arrays, *large]

    def changes_by_anyone(self) -> list[Change]:
        """What the forward pass has changed, and what differs now from what there was before it, whoever has changed
        it: what several blocks hold, or what the model sets in a block before it calls it. Where the model has put back
        what the pass has changed, a repetition changes it again.

        Raises:
            Incompatible: another part of the model has changed a tensor in place.
        """
        tensors = (self.own.get(place) or change_by_others(held) for place, held in enumerate(self.held))
        # Tensors last: what a list held before may have been changed in place.
        others = [*self.own_besides, *self.besides_tensors()]
        return [*others, *(change for change in tensors if change is not None)]

    def change_of(self, held: Held) -> Change | None:
        place = (identity(held.owner), held.name)
        if self.places.num_looks == 1 and held.copy is not None and differ(held.copy, held.tensor):
            self.places.unversioned.add(place)
        if version_of(held.tensor) != held.version or place in self.places.unversioned:
            self.places.written.add(place)
            if held.copy is None:
                raise Incompatible(
                    f"{held.what} was changed in place by a forward pass, which none did before, and it is too large to"
                    f" be copied each time: leave the options that {AGAIN}"
                )
            return OfEntry(held.what, held.owner, held.name, held.copy, is_copied=True)
        is_replaced = held.owner.get(held.name, MISSING) is not held.tensor
        return OfEntry(held.what, held.owner, held.name, held.tensor) if is_replaced else None


def change_by_others(held: Held) -> Change | None:
    """Of a tensor that the forward pass has left as it was, since then."""
    if held.owner.get(held.name, MISSING) is not held.tensor:
        return OfEntry(held.what, held.owner, held.name, held.tensor)
    if version_of(held.tensor) != held.version:
        raise Incompatible(
            f"{held.what} was changed in place after a block that holds it had computed, so that the block can't be"
            " computed again: assign a new tensor instead, or choose ckpt=none and tile=none"
        )
    return None


def contents_of(container: Any) -> Any:
    # By dict's own methods: a class may make a new object for each key that it is asked for.
    return dict(dict.items(container)) if isinstance(container, dict) else list(container)


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
        return all(is_same(dict.get(container, name, MISSING), value) for name, value in before.items())
    return all(map(is_same, container, before))


def checksum(array: Any) -> int:
    return zlib.crc32(array.tobytes())


def same_numbers(now: Any, before: Any) -> bool:
    """Of two arrays, bit for bit."""
    return now.dtype == before.dtype and now.shape == before.shape and now.tobytes() == before.tobytes()


def is_same(now: Any, before: Any) -> bool:
    return now is before or (isinstance(now, PLAIN) and type(now) is type(before) and is_equal(now, before))


def is_equal(now: Any, before: Any) -> bool:
    if isinstance(now, tuple):
        return len(now) == len(before) and all(map(is_same, now, before))
    return now == before


def changed_values(values: Values, before: dict[str, Any], held: set[int]) -> Iterator[Change]:
    """Those that aren't what they were, but for the tensors that `Held` looks at."""
    now = values.now() if values.is_shared else values.owner
    if len(now) == len(before) and all(map(is_, now.values(), before.values())) and now.keys() == before.keys():
        return  # most often
    for name in {*now, *before}:
        if values.is_of_torchs_own and name.startswith("_"):
            continue
        was = before.get(name, MISSING)
        if not is_same(values.owner.get(name, MISSING), was) and id(was) not in held:
            yield OfEntry(f"{values.what}.{name}", values.owner, name, was)


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
