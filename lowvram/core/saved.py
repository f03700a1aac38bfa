"""What a forward pass saves for its backward pass, and knobs that keep it in another form.

PyTorch, `torch.autograd.graph.saved_tensors_hooks`. Of nested hooks torch calls only the innermost: here each keeper
hands on what it leaves as it is, and what it makes, to the keeper around it.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lowvram.compat.torch_autograd import base_of, version_of
from lowvram.compat.torch_modes import is_traceable_wrapper_subclass
from lowvram.core import host
from lowvram.core.rig import Part, Rig


class Saved(ABC):
    """A saved tensor."""

    @abstractmethod
    def read(self) -> Tensor:
        """The tensor. May be asked for again, by another backward pass over the same graph."""


@final
class Kept(Saved):
    """A saved tensor that stays as it is: a weight, an input, or a small one."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # the tensor itself would make a reference cycle with the graph
        self.version = version_of(tensor)

    def read(self) -> Tensor:
        """The tensor. Under hooks autograd doesn't check whether it was changed in place, so that is checked here."""
        if version_of(self.tensor) != self.version:
            raise RuntimeError(
                f"a tensor that the backward pass needs was changed in place after it was saved: "
                f"{list(self.tensor.shape)} is at version {version_of(self.tensor)}, expected was {self.version}"
            )
        return self.tensor


def read(saved: Saved) -> Tensor:
    return saved.read()


class Copy(ABC):
    """A storage in another form. Its views hold it, and the graph holds them."""

    source: weakref.ref[torch.UntypedStorage]

    @abstractmethod
    def view(self, tensor: Tensor) -> Saved:
        """A saved tensor of this storage."""


class Keeper(ABC):
    """Keeps saved tensors in another form, except those of the model and of the batch, which live through the step
    anyway, and small ones. Each storage is copied once, however many saved tensors are views of it.

    Attributes:
        is_exact: what is read back is what was saved, to the last bit.
    """

    is_exact = True

    def __init__(self, model: nn.Module, device: torch.device, min_bytes: int) -> None:
        self._model, self._device, self._min_bytes = model, device, min_bytes
        self._staying: set[int] = set()  # ids of storages
        self._around: Keeper | None = None
        self._copies: weakref.WeakValueDictionary[tuple[int, int], Copy] = weakref.WeakValueDictionary()
        # Disabled for torch.compile, which would try to trace the hooks and fail.
        self._save_and_read: list[Any] = [torch.compiler.disable(hook) for hook in (self.keep, read)]

    @abstractmethod
    def is_apt(self, tensor: Tensor) -> bool:
        """Whether a large tensor that only the backward pass needs should be kept in the other form."""

    @abstractmethod
    def copy(self, storage: torch.UntypedStorage, flat: Tensor) -> Copy:
        """Keep a storage, whose elements are `flat` (num_elements,), in the other form."""

    @contextmanager
    def active(self, part: Part) -> Iterator[None]:
        """Inside it saved tensors are kept in the other form."""
        if not torch.is_grad_enabled():
            yield
            return
        staying = [*self._model.parameters(), *self._model.buffers(), *part.tensors()]
        self._staying = {id(storage) for tensor in staying for storage in host.storages(tensor)}
        self._around = _active[-1] if _active else None
        _active.append(self)
        try:
            with saved_tensors_hooks(*self._save_and_read):
                yield
        finally:
            _active.pop()

    def keep(self, tensor: Tensor) -> Saved:
        return self._copy_of(tensor).view(tensor) if self._may_change(tensor) else self.hand_on(tensor)

    def hand_on(self, tensor: Tensor) -> Saved:
        """Leave the tensor to the keeper around this one; without one it stays as it is."""
        return Kept(tensor) if self._around is None else self._around.keep(tensor)

    def _may_change(self, tensor: Tensor) -> bool:
        if tensor.device.type != self._device.type or is_traceable_wrapper_subclass(tensor):
            return False
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return False
        # Weights are recognised by their class, too: FSDP gathers sharded ones into new storages in every forward pass.
        if isinstance(tensor, nn.Parameter) or isinstance(base_of(tensor), nn.Parameter):
            return False
        storage = tensor.untyped_storage()
        is_needed = id(storage) in self._staying or host.is_marked(storage)
        return storage.nbytes() >= self._min_bytes and not is_needed and self.is_apt(tensor)

    def _copy_of(self, tensor: Tensor) -> Copy:
        """The tensor's storage in the other form. It is made again if the storage has changed since."""
        storage, key = tensor.untyped_storage(), (id(tensor.untyped_storage()), version_of(tensor))
        copy = self._copies.get(key)
        if copy is None or copy.source() is not storage:  # a new storage may have the id of one that is gone
            num_elements = storage.nbytes() // tensor.dtype.itemsize
            copy = self.copy(storage, tensor.detach().as_strided((num_elements,), (1,), 0))
            self._copies[key] = copy
        return copy


_active: list[Keeper] = []  # the innermost last


def is_saved_exactly() -> bool:
    """Whether the backward pass will read what the forward pass saves now, to the last bit."""
    return all(keeper.is_exact for keeper in _active)


def forward_with(rig: Rig, keeper: Keeper) -> Rig:
    """The rig whose forward pass leaves what it saves to `keeper`. The hooks aren't active in the backward pass, so
    what checkpointing recomputes there is saved as it is."""

    def forward(part: Part) -> Any:
        with keeper.active(part):
            return rig.forward(part)

    return replace(rig, forward=forward)


def criterion_with(rig: Rig, keeper: Keeper) -> Rig:
    """The rig whose criterion leaves what it saves to `keeper`."""

    def criterion(outputs: Any, part: Part) -> Tensor:
        with keeper.active(part):
            return rig.criterion(outputs, part)

    return replace(rig, criterion=criterion)
