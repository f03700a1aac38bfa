"""The ledger: every tensor storage's birth and death, and so the exact peak of live bytes, by what they hold.

It counts what the same run would ask of a CUDA caching allocator (storages, rounded up to 512 bytes) and works on any
device. It is a dispatch mode, and compiled code turns eager under one: never enter it before compiled steps.
The idea of following storages through a dispatch mode is torch.distributed._tools.mem_tracker's.
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
from lowvram.compat.torch_modes import TorchDispatchMode
from lowvram.compat.torch_storage import resizes_told
from lowvram.compat.torch_trees import tree_leaves
from lowvram.core import host
from lowvram.core.knob import Kind
from lowvram.core.peak import Peak

FUNCTION = sys.modules[torch.autograd.Function.__module__].__file__
OriginOf = Callable[[Tensor, Any], Any]  # of a tensor's birth, and the operator that made it (None: it was there)


class HasState(Protocol):
    def state_dict(self) -> dict[str, Any]: ...


@contextmanager
def ledger(
    model: nn.Module | None = None,
    optimizer: HasState | None = None,
    inputs: Any = None,
    device: torch.device | None = None,
    origin_of: OriginOf | None = None,
) -> Iterator[Peak]:
    """Follow all memory of tensors inside the block.

    Args:
        model: its parameters, buffers and gradients get their kinds.
        optimizer: anything with a `state_dict()` of tensors (an optimizer, a stepper).
        inputs: tensors that were made before the block, in any nesting.
        device: whose memory it is; None is the model's, where its first parameter lies.
        origin_of: called at each allocation; what it returns is found in `Peak.holdings`.

    Without them the block's own tensors are still counted. What an optimizer makes inside its step is other; all else
    is made by a forward or a backward pass, kept or of a moment: activations.
    """
    peak, book = Peak(), Ledger(main_device(model) if device is None else device.type, origin_of)
    gc.collect()  # so that only live tensors are counted
    origins = None if origin_of is None else book.origins
    with ExitStack() as undo:
        undo.callback(peak.fill, book.lines, book.kinds, origins)
        undo.enter_context(book.followed())
        book.own(inputs, Kind.INPUTS)
        if model is not None:
            book.own_model(model)
        if optimizer is not None:
            book.own(optimizer.state_dict(), Kind.OPTIMIZER)
        with book:
            yield peak
        if optimizer is not None:
            book.own(optimizer.state_dict(), Kind.OPTIMIZER)  # the first update gave birth to it


def announce(tensor: Tensor, kind: Kind) -> Tensor:
    """The same tensor, its kind told to whoever keeps a ledger: for what isn't to be seen from outside, such as a
    gradient that is used and freed as it is born."""
    for book in _open:
        book.own(tensor, kind)
    return tensor


def main_device(model: nn.Module | None) -> str | None:
    """The type of the device that the model is on; None without a model."""
    return None if model is None else next((tensor.device.type for tensor in model.parameters()), None)


_open: list[Ledger] = []


class Storage(NamedTuple):
    """A storage that is alive."""

    serial: int
    num_bytes: int
    death: weakref.ref[torch.UntypedStorage]  # writes it down


class Meeting(NamedTuple):
    """Two gradients of one tensor are added up."""

    line: int  # of the sum's birth
    address: int  # of the storage that autograd would add to in place


NO_MEETING = Meeting(0, 0)


def is_meeting(terms: Sequence[Any]) -> bool:
    """Whether autograd adds gradients, and would do it in place without a dispatch mode.

    Under a mode it never does (`can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp), so the sum would be
    counted beside both. We check autograd's other in-place conditions; exclusive ownership is inferred from the
    immediate deallocation.
    """
    if current_node() is None or torch.is_grad_enabled() or is_in_function():
        return False
    one, other = terms[:2]
    is_alike = isinstance(other, Tensor) and one.shape == other.shape and one.dtype == other.dtype
    is_view = base_of(one) is not None  # it holds what it is a view of
    return is_alike and not is_view and is_dense(one)


def is_dense(tensor: Tensor) -> bool:
    """Whether its numbers lie side by side in memory, in whatever order, and none of them twice."""
    num_numbers = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != num_numbers:
            return False
        num_numbers *= max(1, size)
    return True


def is_in_function() -> bool:
    """Whether the backward pass of an `autograd.Function` is under way, which adds what it likes."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_filename != FUNCTION:
        frame = frame.f_back
    return frame is not None


class Ledger(TorchDispatchMode):
    """The book itself: one line per birth, change of size and death of a storage. Inside `followed` it may be entered
    as a mode, and then sees what operators make; or another mode tells it."""

    def __init__(self, device_type: str | None = None, origin_of: OriginOf | None = None) -> None:
        super().__init__()
        self.device_type = device_type  # what lies elsewhere is of kind host, and no part of the peak
        self.origin_of = origin_of
        self.origins: dict[int, Any] = {}  # by serial number
        self.lines: list[tuple[int, int]] = []  # (serial number of the storage, its bytes from now on: 0 at its death)
        self.kinds: dict[int, Kind] = {}  # by serial number; the last word counts for the storage's whole life
        self.alive: dict[int, Storage] = {}  # by the storage's address
        self.born = Kind.ACTIVATIONS  # of what nothing more is known of
        self.meeting = NO_MEETING  # the latest
        self.num_updates = 0  # that are under way: an optimizer may run another
        self.parameters: set[Tensor] = set()
        self.hooks: list[Any] = []

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Inside it deaths, host memory and updates are noted, and none is put off to a moment of the collector's
        choice. Afterwards the book lets go of what lives on."""
        with ExitStack() as undo:
            _open.append(self)
            undo.callback(_open.remove, self)
            undo.callback(gc.enable if gc.isenabled() else gc.disable)
            gc.disable()
            undo.callback(self._let_go)
            undo.enter_context(self.listening())
            yield

    def _let_go(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.alive.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # then it comes again, for the tensors that this rank holds
        out = func(*args, **(kwargs or {}))
        self.see(func, args, out)
        return out

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside it the book hears of host memory, of updates, and of storages that change their size."""
        with ExitStack() as undo:
            host.listeners.append(self.own_host)
            undo.callback(host.listeners.remove, self.own_host)
            undo.callback(register_optimizer_step_pre_hook(self.begin_update).remove)
            undo.callback(register_optimizer_step_post_hook(self.end_update).remove)
            undo.enter_context(resizes_told(self._note_size))
            yield

    def see(self, operator: Any, args: Sequence[Any], out: Any) -> None:
        """Write down what an operator has made."""
        if operator is torch.ops.aten.add.Tensor and is_meeting(args):
            self.meeting = Meeting(len(self.lines), id(args[0].untyped_storage()))
        for tensor in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.note(tensor, self.born, operator)

    def begin_update(self, *_: Any) -> None:
        self.num_updates += 1
        self.born = Kind.OTHER

    def end_update(self, *_: Any) -> None:
        self.num_updates -= 1
        self.born = Kind.OTHER if self.num_updates else Kind.ACTIVATIONS

    def own_model(self, model: nn.Module) -> None:
        """Give parameters, buffers and gradients their kinds."""
        self.own(list(model.buffers()), Kind.PARAMETERS)
        for module in model.modules():
            self.own_parameters(module)
            # A sharded module computes with other parameters, which are gathered for the while.
            self.hooks.append(module.register_forward_hook(self.own_parameters, prepend=True))

    def own_parameters(self, module: nn.Module, *_: Any) -> None:
        """Give the parameters that a module has right now their kind, and their gradients theirs."""
        for parameter in module.parameters(recurse=False):
            if parameter not in self.parameters:
                self.parameters.add(parameter)
                self.own(parameter, Kind.PARAMETERS)
                self.own_gradient(parameter)
                if parameter.requires_grad:
                    self.hooks.append(parameter.register_post_accumulate_grad_hook(self.own_gradient))

    def own_gradient(self, parameter: Tensor) -> None:
        self.own(parameter.grad, Kind.GRADIENTS)

    def own(self, tensors: Any, kind: Kind) -> None:
        """Count every tensor in any nesting of containers as `kind`, unless it is a parameter already."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                for serial in self.note(tensor, kind):
                    if self.kinds[serial] not in (Kind.PARAMETERS, Kind.HOST):
                        self.kinds[serial] = kind

    def own_host(self, tensor: Tensor) -> None:
        """Count a tensor as host memory, wherever it seems to lie."""
        for serial in self.note(tensor, Kind.HOST):
            self.kinds[serial] = Kind.HOST

    def note(self, tensor: Tensor, kind: Kind, operator: Any = None) -> list[int]:
        """Write down the birth of the tensor's storages if they are new; returns their serial numbers."""
        storages = host.storages(tensor)
        known = [self.alive[id(storage)].serial for storage in storages if id(storage) in self.alive]
        if len(known) == len(storages):
            return known  # without asking for the device, which takes long of tensors without memory
        device_type = tensor.device.type
        if device_type == "meta" and self.device_type not in (None, "meta"):
            return []  # there is no memory behind it
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
        at, added_to = self.meeting
        is_next = address == added_to and all(num_bytes == 0 for _, num_bytes in self.lines[at + 1 :])
        self.lines.insert(at if is_next else len(self.lines), (dead.serial, 0))

    def _note_size(self, storage: torch.UntypedStorage) -> None:
        is_fake = storage.device.type == "meta"  # whatever device its tensor pretends to be on
        is_here = (is_fake or self.device_type in (None, storage.device.type)) and not host.is_marked(storage)
        serial = self._note_storage(storage, self.born if is_here else Kind.HOST)
        known, num_bytes = self.alive[id(storage)], storage.nbytes()
        if num_bytes != known.num_bytes:
            self.alive[id(storage)] = known._replace(num_bytes=num_bytes)
            self.lines.append((serial, num_bytes))
