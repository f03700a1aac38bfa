"""offload=activations and disk: the tensors that the forward pass saves for the backward pass wait outside the device.

PyTorch, `torch.autograd.graph.saved_tensors_hooks`; torchtune, `OffloadActivations` (streams, a bound on what leaves).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lowvram.compat.torch_autograd import base_of, version_of
from lowvram.compat.torch_modes import is_traceable_wrapper_subclass
from lowvram.config.errors import require
from lowvram.core import host
from lowvram.core.knob import Kind, Knob, Stage
from lowvram.core.rig import Part, Rig
from lowvram.knobs.offload.buffers import Pool, in_file, in_host_memory
from lowvram.knobs.offload.transfer import Away, Saved, Transfer, transfer_for


@dataclass(frozen=True)
class Activations(Knob):
    """Saved activations wait in host memory, pinned on a card, where copies overlap with the computation."""

    min_bytes: int = 4096
    in_flight: int = 4

    stage = Stage.NUMERICS
    moves_to_host = True
    saves = Kind.ACTIVATIONS

    def __post_init__(self) -> None:
        require_sizes(self.min_bytes, self.in_flight)

    def remedies(self) -> Mapping[Kind, int]:
        return {Kind.ACTIVATIONS: 30}

    def apply(self, rig: Rig) -> Rig:
        return offload(rig, in_host_memory(rig.device), self.min_bytes, self.in_flight)


@dataclass(frozen=True)
class ActivationsOnDisk(Knob):
    """Saved activations wait in a file."""

    folder: str | None = None
    min_bytes: int = 4096
    in_flight: int = 4

    stage = Stage.NUMERICS
    saves = Kind.ACTIVATIONS

    def __post_init__(self) -> None:
        require_sizes(self.min_bytes, self.in_flight)
        is_usable = self.folder is None or (Path(self.folder).is_dir() and os.access(self.folder, os.W_OK | os.X_OK))
        require(is_usable, "offload.folder", self.folder, "null or a folder that exists and can be written to")

    def apply(self, rig: Rig) -> Rig:
        return offload(rig, in_file(self.folder), self.min_bytes, self.in_flight)


def require_sizes(min_bytes: int, in_flight: int) -> None:
    require(min_bytes >= 1, "offload.min_bytes", min_bytes, "at least 1")
    require(in_flight >= 1, "offload.in_flight", in_flight, "at least 1")


def offload(rig: Rig, pool: Pool, min_bytes: int, in_flight: int) -> Rig:
    """The rig whose forward pass and criterion save their tensors outside the device. The hooks aren't active in the
    backward pass, so what checkpointing recomputes there stays on the device."""
    hooks = Hooks(rig.model, rig.device, min_bytes, pool, transfer_for(rig.device, in_flight))

    def forward(part: Part) -> Any:
        with hooks.active(part):
            return rig.forward(part)

    def criterion(outputs: Any, part: Part) -> Tensor:
        with hooks.active(part):
            return rig.criterion(outputs, part)

    return replace(rig, forward=forward, criterion=criterion)


class Kept:
    """A saved tensor that stays on the device: a weight, an input, or a small one."""

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


def read(saved: Saved | Kept) -> Tensor:
    return saved.read()


class Hooks:
    """The hooks that autograd calls for each tensor that it saves."""

    def __init__(self, model: nn.Module, device: torch.device, min_bytes: int, pool: Pool, transfer: Transfer) -> None:
        self._model, self._device, self._min_bytes = model, device, min_bytes
        self._pool, self._transfer = pool, transfer
        self._staying: set[int] = set()  # ids of storages
        # Disabled for torch.compile, which would try to trace the hooks and fail.
        self._pack_and_read: list[Any] = [torch.compiler.disable(hook) for hook in (self._pack, read)]
        self._away: weakref.WeakValueDictionary[tuple[int, int], Away] = weakref.WeakValueDictionary()

    @contextmanager
    def active(self, part: Part) -> Iterator[None]:
        """Tensors saved inside the block leave the device, except those of the model and of `part`, which live through
        the step anyway."""
        if not torch.is_grad_enabled():
            yield
            return
        staying = [*self._model.parameters(), *self._model.buffers(), *part.tensors()]
        self._staying = {id(storage) for tensor in staying for storage in host.storages(tensor)}
        with saved_tensors_hooks(*self._pack_and_read):
            yield

    def _pack(self, tensor: Tensor) -> Saved | Kept:
        return Saved(self._send_away(tensor), tensor) if self._may_leave(tensor) else Kept(tensor)

    def _may_leave(self, tensor: Tensor) -> bool:
        if tensor.device.type != self._device.type or is_traceable_wrapper_subclass(tensor):
            return False
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return False
        # Weights are recognised by their class, too: FSDP gathers sharded ones into new storages in every forward pass.
        if isinstance(tensor, nn.Parameter) or isinstance(base_of(tensor), nn.Parameter):
            return False
        storage = tensor.untyped_storage()
        is_needed = id(storage) in self._staying or host.is_marked(storage)
        return storage.nbytes() >= self._min_bytes and not is_needed

    def _send_away(self, tensor: Tensor) -> Away:
        """Copy the tensor's storage out, unless that was done for another view of it and it hasn't changed since."""
        storage, key = tensor.untyped_storage(), (id(tensor.untyped_storage()), version_of(tensor))
        away = self._away.get(key)
        if away is None or away.source() is not storage:  # a new storage may have the id of one that is gone
            num_elements = storage.nbytes() // tensor.dtype.itemsize
            buffer = self._pool.take(storage.nbytes())
            away = Away(self._transfer, self._pool, buffer, weakref.ref(storage), tensor.dtype, num_elements)
            self._transfer.leave(away, tensor.detach().as_strided((num_elements,), (1,), 0))
            self._away[key] = away
        return away
