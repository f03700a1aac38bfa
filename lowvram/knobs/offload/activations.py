"""offload=activations and disk: the tensors that the forward pass saves for the backward pass wait outside the device.

PyTorch, `torch.autograd.graph.saved_tensors_hooks`; torchtune, `OffloadActivations` (streams, a bound on what leaves).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from lowvram.config.errors import require
from lowvram.core.host_file import check_folder
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob, Neutral, Stage
from lowvram.core.rig import Rig
from lowvram.core.saved import Keeper, criterion_with, forward_with
from lowvram.knobs.offload.buffers import Pool, in_file, in_host_memory
from lowvram.knobs.offload.transfer import Away, Transfer, transfer_for


@dataclass(frozen=True)
class KeepOnDevice(Neutral):
    """Everything stays on the device."""

    stage = Stage.NUMERICS


@dataclass(frozen=True)
class Activations(Knob):
    """Saved activations wait in host memory, pinned on a card, where copies overlap with the computation."""

    min_bytes: int = 4096
    in_flight: int = 4

    stage = Stage.NUMERICS
    moves_to_host = True
    saves = Kind.ACTIVATIONS
    remedy = (Kind.ACTIVATIONS, 30)

    def __post_init__(self) -> None:
        require_sizes(self.min_bytes, self.in_flight)

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
        check_folder("offload.folder", self.folder)

    def apply(self, rig: Rig) -> Rig:
        return offload(rig, in_file(self.folder), self.min_bytes, self.in_flight)


def require_sizes(min_bytes: int, in_flight: int) -> None:
    require(min_bytes >= 1, "offload.min_bytes", min_bytes, "at least 1")
    require(in_flight >= 1, "offload.in_flight", in_flight, "at least 1")


def offload(rig: Rig, pool: Pool, min_bytes: int, in_flight: int) -> Rig:
    """The rig whose forward pass and criterion save their tensors outside the device."""
    hooks = Hooks(rig.model, rig.device, min_bytes, pool, transfer_for(rig.device, in_flight))
    return criterion_with(forward_with(rig, hooks), hooks)


@final
class Hooks(Keeper):
    """Keeps saved tensors outside the device."""

    def __init__(self, model: nn.Module, device: torch.device, min_bytes: int, pool: Pool, transfer: Transfer) -> None:
        super().__init__(model, device, min_bytes)
        self._pool, self._transfer = pool, transfer

    def is_apt(self, tensor: Tensor) -> bool:
        return True

    def copy(self, storage: torch.UntypedStorage, flat: Tensor) -> Away:
        buffer = self._pool.take(storage.nbytes())
        away = Away(self._transfer, self._pool, buffer, weakref.ref(storage), flat.dtype, len(flat))
        self._transfer.leave(away, flat)
        return away
