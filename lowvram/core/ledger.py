"""The ledger: every tensor storage's birth and death, and so the exact peak of live bytes, by what they hold.

It counts what the same run would ask of a CUDA caching allocator (storages, rounded up to 512 bytes) and works on any
device. It is a dispatch mode, and compiled code turns eager under one: never enter it before compiled steps.
The idea of following storages through a dispatch mode is torch.distributed._tools.mem_tracker's.
"""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from lowvram.core.knob import Kind

ROUND_BYTES = 512  # the CUDA caching allocator's


@dataclass
class Peak:
    """What a ledger saw; filled when it closes. All in bytes."""

    peak_bytes: int = 0
    by_kind: dict[Kind, int] = field(default_factory=dict)  # at the moment of the peak
    by_kind_max: dict[Kind, int] = field(default_factory=dict)  # each kind's own largest moment


class HasState(Protocol):
    def state_dict(self) -> dict[str, Any]: ...


@contextmanager
def ledger(model: nn.Module | None = None, optimizer: HasState | None = None, inputs: Any = None) -> Iterator[Peak]:
    """Follow all memory of tensors inside the block.

    Args:
        model: its parameters, buffers and gradients get their kinds.
        optimizer: anything with a `state_dict()` of tensors (an optimizer, a stepper).
        inputs: tensors that were made before the block, in any nesting.

    Without them the block's own tensors are still counted: made with gradients enabled they are activations (also
    when a checkpointed block is recomputed in the backward pass), else other.
    """
    peak, book = Peak(), Ledger()
    gc.collect()  # so that only live tensors are counted, and none dies at a moment of the collector's choice
    gc.disable()
    try:
        book.own(inputs, Kind.INPUTS)
        handles = book.own_model(model) if model is not None else []
        if optimizer is not None:
            book.own(optimizer.state_dict(), Kind.OPTIMIZER)
        with book:
            yield peak
        if optimizer is not None:
            book.own(optimizer.state_dict(), Kind.OPTIMIZER)  # the first update gave birth to it
        for handle in handles:
            handle.remove()
        book.close(peak)
    finally:
        gc.enable()


class Ledger(TorchDispatchMode):
    """The book itself: one line per birth and death of a storage."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, int]] = []  # (serial number of the storage, bytes: negative at its death)
        self.kinds: dict[int, Kind] = {}  # by serial number; the last word counts for the storage's whole life
        self.alive: dict[int, tuple[int, int]] = {}  # address of the storage -> (serial number, bytes)
        self.is_open = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        kind = Kind.ACTIVATIONS if torch.is_grad_enabled() else Kind.OTHER
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.note(tensor, kind)
        return out

    def own_model(self, model: nn.Module) -> list[Any]:
        """Give parameters, buffers and gradients their kinds; returns hooks to remove."""
        self.own([*model.parameters(), *model.buffers()], Kind.PARAMETERS)
        self.own([parameter.grad for parameter in model.parameters()], Kind.GRADIENTS)
        return [
            parameter.register_post_accumulate_grad_hook(lambda p: self.own(p.grad, Kind.GRADIENTS))
            for parameter in model.parameters()
            if parameter.requires_grad
        ]

    def own(self, tensors: Any, kind: Kind) -> None:
        """Count every tensor in any nesting of containers as `kind`, unless it is a parameter already."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                for serial in self.note(tensor, kind):
                    if self.kinds[serial] is not Kind.PARAMETERS:
                        self.kinds[serial] = kind

    def note(self, tensor: Tensor, kind: Kind) -> list[int]:
        """Write down the birth of the tensor's storages if they are new; returns their serial numbers."""
        return [self._note_storage(storage, kind) for storage in storages(tensor)]

    def _note_storage(self, storage: torch.UntypedStorage, kind: Kind) -> int:
        address = storage._cdata
        if address not in self.alive:
            serial, num_bytes = len(self.kinds), -(-storage.nbytes() // ROUND_BYTES) * ROUND_BYTES
            self.alive[address] = (serial, num_bytes)
            self.kinds[serial] = kind
            self.lines.append((serial, num_bytes))
            weakref.finalize(storage, self._died, address).atexit = False
        return self.alive[address][0]

    def _died(self, address: int) -> None:
        serial, num_bytes = self.alive.pop(address)
        if self.is_open:
            self.lines.append((serial, -num_bytes))

    def close(self, peak: Peak) -> None:
        """Play the book back, now that every kind is known, and fill `peak`."""
        self.is_open = False
        live: dict[Kind, int] = defaultdict(int)
        most: dict[Kind, int] = defaultdict(int)
        total = 0
        for serial, num_bytes in self.lines:
            kind = self.kinds[serial]
            live[kind] += num_bytes
            most[kind] = max(most[kind], live[kind])
            total += num_bytes
            if total > peak.peak_bytes:
                peak.peak_bytes, peak.by_kind = total, dict(live)
        peak.by_kind = {kind: peak.by_kind.get(kind, 0) for kind in Kind}
        peak.by_kind_max = {kind: most[kind] for kind in Kind}


def storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    """The storages behind a tensor: one, or those of the tensors inside a wrapper subclass (low-bit states)."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [storage for name in names for storage in storages(getattr(tensor, name))]
    return [tensor.untyped_storage()]
