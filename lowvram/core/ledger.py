"""The ledger: records when each tensor storage is born and dies, and so the exact peak of live bytes, by kind.

It counts what the same run would request from CUDA's caching allocator (storages, rounded up to 512 bytes), and works
on any device. It is a dispatch mode, after which compiled code runs eagerly: never enter it before compiled steps.
Following storages through a dispatch mode is the idea of torch.distributed._tools.mem_tracker.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lowvram.compat.torch_autograd import base_of, current_node
from lowvram.compat.torch_modes import TorchDispatchMode, is_in_dispatch_mode
from lowvram.compat.torch_storage import on_storage_resize
from lowvram.compat.torch_trees import tree_leaves
from lowvram.core import host
from lowvram.core.kind import Kind
from lowvram.core.peak import Peak

FUNCTION = sys.modules[torch.autograd.Function.__module__].__file__
ENGINE = torch.autograd.graph.__file__
OriginOf = Callable[[Tensor, Any], Any]  # of a new tensor and the operator that made it; None: it existed before


class HasState(Protocol):
    def state_dict(self) -> dict[str, Any]: ...


@contextmanager
def ledger(
    model: nn.Module | None = None,
    optimizer: HasState | None = None,
    inputs: Any = None,
    device: torch.device | None = None,
    origin_of: OriginOf | None = None,
    teacher: nn.Module | None = None,
) -> Iterator[Peak]:
    """Count the memory of all tensors inside the block.

    Args:
        model: so that its parameters, buffers and gradients are counted as such.
        optimizer: anything with a `state_dict()` of tensors (an optimizer, a stepper).
        inputs: the batch, made before the block, in any nesting of containers.
        device: the device whose memory is counted; None: that of the model's first parameter.
        origin_of: called at each allocation; `Peak.holdings` has what it returns.
        teacher: a model that doesn't train, whose parameters and buffers are counted as such.

    Without these arguments the tensors that the block makes are still counted: as OTHER if an optimizer makes them
    inside its step, else as ACTIVATIONS.
    """
    record = Ledger(main_device(model) if device is None else device.type, origin_of)
    peak = Peak(record.lines, record.kinds)
    gc.collect()  # so that only live tensors are counted
    origins = None if origin_of is None else record.origins
    with ExitStack() as undo:
        undo.callback(peak.fill, origins)
        undo.enter_context(record.recording())
        record.set_kind(inputs, Kind.INPUTS)
        if model is not None:
            record.set_model_kinds(model)
        if teacher is not None:
            record.set_model_kinds(teacher)
        if optimizer is not None:
            record.set_kind(optimizer.state_dict(), Kind.OPTIMIZER)
        with record:
            yield peak
        if optimizer is not None:
            record.set_kind(optimizer.state_dict(), Kind.OPTIMIZER)  # the first update makes the state


def announce(tensor: Tensor, kind: Kind) -> Tensor:
    """Tell every open ledger the kind of a tensor, and return the tensor. For tensors that a ledger couldn't classify,
    such as a gradient that is used and freed inside the backward pass. Ledgers don't see trials of a model, which run
    outside of dispatch modes."""
    if is_in_dispatch_mode():
        for record in _open:
            record.set_kind(tensor, kind)
    return tensor


def main_device(model: nn.Module | None) -> str | None:
    """The device type of the model's first parameter; None if there is none."""
    return None if model is None else next((tensor.device.type for tensor in model.parameters()), None)


_open: list[Ledger] = []


class Storage(NamedTuple):
    """A storage that is alive."""

    serial: int
    num_bytes: int
    death: weakref.ref[torch.UntypedStorage]  # its callback records the death


class AddedGradients(NamedTuple):
    """An addition by which autograd has accumulated two gradients of one tensor."""

    line: int  # index of the sum's birth in `Ledger.lines`
    address: int  # of the storage into which autograd would have added in place
    sum_address: int


NO_SUM = AddedGradients(0, 0, 0)


def is_gradient_sum(terms: Sequence[Any]) -> bool:
    """Whether an `add` is autograd summing two gradients, which it would do in place without a dispatch mode.

    Under a mode autograd never adds in place (`can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp), so the
    sum would be counted beside both terms. We check autograd's other in-place conditions; exclusive ownership is
    inferred from the immediate deallocation.
    """
    if current_node() is None or torch.is_grad_enabled() or is_in_function():
        return False
    one, other = terms[:2]
    is_alike = isinstance(other, Tensor) and one.shape == other.shape and one.dtype == other.dtype
    is_view = base_of(one) is not None
    return is_alike and not is_view and is_dense(one)


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor's elements fill its memory without gaps or overlap, in any order of dimensions."""
    num_elements = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != num_elements:
            return False
        num_elements *= max(1, size)
    return True


def is_in_function() -> bool:
    """Whether the backward pass of an `autograd.Function` is running: an `add` then belongs to it, not to autograd. A
    backward pass that the function has started is autograd's again."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_filename not in (FUNCTION, ENGINE):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == FUNCTION


class Ledger(TorchDispatchMode):
    """The record: one line per birth, resize and death of a storage. Inside `recording`, either enter it as a dispatch
    mode, so that it sees what operators make, or call `see` from another mode."""

    def __init__(self, device_type: str | None = None, origin_of: OriginOf | None = None) -> None:
        super().__init__()
        self.device_type = device_type  # tensors elsewhere are of kind HOST, which the peak leaves out
        self.origin_of = origin_of
        self.origins: dict[int, Any] = {}  # by serial number
        self.lines: list[tuple[int, int]] = []  # (serial number of the storage, its bytes from now on: 0 at its death)
        self.kinds: dict[int, Kind] = {}  # by serial number; the last kind set counts for the storage's whole life
        self.alive: dict[int, Storage] = {}  # by the storage's address
        self.born = Kind.ACTIVATIONS  # the kind of new tensors, unless `set_kind` gives them another
        self.latest_sum = NO_SUM
        self.num_updates = 0  # optimizer steps that are running: one optimizer may call another one's step
        self.parameters: set[Tensor] = set()
        self.hooks: list[Any] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside it deaths, resizes, host memory and optimizer updates are recorded. Python's garbage collector is off:
        tensors that only it would free would die at random times. Afterwards hooks are removed, and deaths are no
        longer recorded."""
        with ExitStack() as undo:
            _open.append(self)
            undo.callback(_open.remove, self)
            undo.callback(gc.enable if gc.isenabled() else gc.disable)
            gc.disable()
            undo.callback(self._close)
            undo.enter_context(self.listening())
            yield

    def _close(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.alive.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # torch then calls this again for the rank's local tensors
        out = func(*args, **(kwargs or {}))
        self.see(func, args, out)
        return out

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside it host memory, optimizer updates and resizes of storages call the methods below."""
        with ExitStack() as undo:
            host.listeners.append(self.set_host_kind)
            undo.callback(host.listeners.remove, self.set_host_kind)
            undo.callback(register_optimizer_step_pre_hook(self.begin_update).remove)
            undo.callback(register_optimizer_step_post_hook(self.end_update).remove)
            undo.enter_context(on_storage_resize(self._note_size))
            yield

    def see(self, operator: Any, args: Sequence[Any], out: Any) -> None:
        """Record the storages that an operator has made."""
        if operator is torch.ops.aten.add.Tensor and is_gradient_sum(args):
            self.latest_sum = AddedGradients(len(self.lines), id(args[0].untyped_storage()), id(out.untyped_storage()))
        for tensor in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.note(tensor, self.born, operator)

    def begin_update(self, *_: Any) -> None:
        self.num_updates += 1
        self.born = Kind.OTHER

    def end_update(self, *_: Any) -> None:
        self.num_updates -= 1
        self.born = Kind.OTHER if self.num_updates else Kind.ACTIVATIONS

    def set_model_kinds(self, model: nn.Module) -> None:
        """Set the kinds of parameters, buffers and gradients, now and of those that come later."""
        self.set_kind(list(model.buffers()), Kind.PARAMETERS)
        for module in model.modules():
            self.set_parameter_kinds(module)
            # A sharded module computes with other parameters, which are gathered for its forward pass.
            self.hooks.append(module.register_forward_hook(self.set_parameter_kinds, prepend=True))

    def set_parameter_kinds(self, module: nn.Module, *_: Any) -> None:
        """Set the kinds of the parameters that a module has right now, and of their gradients."""
        for parameter in module.parameters(recurse=False):
            if parameter not in self.parameters:
                self.parameters.add(parameter)
                self.set_kind(parameter, Kind.PARAMETERS)
                self.set_gradient_kind(parameter)
                if parameter.requires_grad:
                    self.hooks.append(parameter.register_post_accumulate_grad_hook(self.set_gradient_kind))

    def set_gradient_kind(self, parameter: Tensor) -> None:
        self.set_kind(parameter.grad, Kind.GRADIENTS)

    def set_kind(self, tensors: Any, kind: Kind) -> None:
        """Count every tensor in any nesting of containers as `kind`, unless it is a parameter or host memory."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                for serial in self.note(tensor, kind):
                    if self.kinds[serial] not in (Kind.PARAMETERS, Kind.HOST):
                        self.kinds[serial] = kind

    def set_host_kind(self, tensor: Tensor) -> None:
        """Count a tensor as host memory, whatever its device."""
        for serial in self.note(tensor, Kind.HOST):
            self.kinds[serial] = Kind.HOST

    def note(self, tensor: Tensor, kind: Kind, operator: Any = None) -> list[int]:
        """Record the birth of the tensor's storages if they are new; returns their serial numbers."""
        storages = host.storages(tensor)
        known = [self.alive[id(storage)].serial for storage in storages if id(storage) in self.alive]
        if len(known) == len(storages):
            return known  # early, since asking a fake tensor for its device is slow
        device_type = tensor.device.type
        if device_type == "meta" and self.device_type not in (None, "meta"):
            return []  # it has no memory
        is_here = self.device_type in (None, device_type) and not host.is_computing()
        num_known = len(self.kinds)
        serials = [
            self._note_storage(storage, kind if is_here and not host.is_marked(storage) else Kind.HOST)
            for storage in storages
        ]
        if self.origin_of is not None and len(self.kinds) > num_known:
            self.origins |= {serial: self.origin_of(tensor, operator) for serial in serials if serial >= num_known}
        return serials

    def _note_storage(self, storage: torch.UntypedStorage, kind: Kind) -> int:
        address = id(storage)
        if address not in self.alive:
            serial, num_bytes = len(self.kinds), storage.nbytes()
            self.alive[address] = Storage(serial, num_bytes, weakref.ref(storage, partial(self._died, address)))
            self.kinds[serial] = kind
            self.lines.append((serial, num_bytes))
        return self.alive[address].serial

    def _died(self, address: int, _: weakref.ref[torch.UntypedStorage]) -> None:
        dead = self.alive.pop(address)
        line, added_to, sum_address = self.latest_sum
        # The first term died right after the sum was made: without a dispatch mode autograd would have added in place,
        # so the sum is counted as the same storage.
        is_in_place = address == added_to and all(num_bytes == 0 for _, num_bytes in self.lines[line + 1 :])
        if is_in_place and sum_address in self.alive:
            del self.lines[line]
            self.alive[sum_address] = self.alive[sum_address]._replace(serial=dead.serial)
            self.latest_sum = NO_SUM
        else:
            self.lines.append((dead.serial, 0))

    def _note_size(self, storage: torch.UntypedStorage) -> None:
        is_fake = storage.device.type == "meta"  # whatever device the fake tensor shows
        is_here = (is_fake or self.device_type in (None, storage.device.type)) and not host.is_marked(storage)
        serial = self._note_storage(storage, self.born if is_here else Kind.HOST)
        known, num_bytes = self.alive[id(storage)], storage.nbytes()
        if num_bytes != known.num_bytes:
            self.alive[id(storage)] = known._replace(num_bytes=num_bytes)
            self.lines.append((serial, num_bytes))
