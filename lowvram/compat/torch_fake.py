"""Private names of torch's fake tensors, which have metadata, but no values and no memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor

from lowvram.compat.torch_fake_shapes import RESULTS

C: Any = torch._C
FAKE = C._TorchDispatchModeKey.FAKE
_make: Any = Tensor._make_subclass
_warn_as_set: Any = C._set_warn_deprecated_on_mutable_data_ptr

logging.getLogger(fake_tensor.__name__).addFilter(lambda record: "attempting to run meta" not in str(record.msg))
"""Not logged: that an operator fails on fake tensors. Its error is raised, too, and who tries the operator tells it.

The message "failed while attempting to run meta for ..." of torch._subclasses.fake_tensor, since 2.1. Removed, if torch
logs it no more.
"""

FakeTensor = fake_tensor.FakeTensor
"""The class of fake tensors.

torch._subclasses.fake_tensor.FakeTensor, since 1.13. Replaced by a public name, if torch makes one.
"""


class FakeTensorMode(fake_tensor.FakeTensorMode):
    """Inside such a mode all tensors that are made are fake.

    torch._subclasses.fake_tensor.FakeTensorMode, since 1.13: tensors on the device meta have no memory either, but code
    that checks a tensor's device would see meta. Replaced by a public name, if torch makes one.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in RESULTS:
            return super().__torch_dispatch__(func, types, args, kwargs)
        with self:
            return RESULTS[func](*args, **(kwargs or {}))


class GuessingFakeTensorMode(FakeTensorMode):
    """Such a mode for trials of code whose way depends on values: each number that it reads from a fake tensor is 1.

    torch._subclasses.fake_tensor.FakeTensorMode, since 1.13, as above: its own `allow_scalar_outputs` makes symbols,
    on which code can't branch. Replaced by a public option, if torch makes one.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            if not isinstance(args[0], FakeTensor):  # a constant
                with without_fake_mode():
                    return func(*args)
            return True if args[0].dtype is torch.bool else 1.0 if args[0].dtype.is_floating_point else 1
        return super().__torch_dispatch__(func, types, args, kwargs)


def is_fake(value: object) -> bool:
    """Whether a value is a tensor without values and memory, as in a plan.

    torch._subclasses.fake_tensor.FakeTensor, since 1.13. Replaced by a public function, if torch makes one.
    """
    return isinstance(value, FakeTensor)


def without_fake_mode() -> AbstractContextManager[object]:
    """Inside it new tensors are real, also inside a FakeTensorMode.

    torch._subclasses.fake_tensor.unset_fake_temporarily, since 2.2. Replaced by a public name, if torch makes one.
    """
    return fake_tensor.unset_fake_temporarily()


# Called for every operator of a plan, so these are torch's own functions, without wrappers that would take time.

current_fake_mode: Callable[[], Any] = partial(C._get_dispatch_mode, FAKE)
"""The active FakeTensorMode; None if none is.

torch._C._get_dispatch_mode, since 2.2. Replaced by a public name, if torch makes one.
"""

leave_fake_mode: Callable[[], Any] = partial(C._unset_dispatch_mode, FAKE)
"""Do what `without_fake_mode` does on entry, without its context managers, which took a twentieth of a plan's time.

torch._C._unset_dispatch_mode, since 2.2. Replaced by `without_fake_mode`, if that gets as fast.
"""

enter_fake_mode: Callable[[Any], None] = C._set_dispatch_mode
"""Activate a mode again that was left with `leave_fake_mode`.

torch._C._set_dispatch_mode, since 2.2. Replaced by `without_fake_mode`, if that gets as fast.
"""

dispatch_keys: Callable[[Tensor], Any] = C._dispatch_keys
"""The keys by which torch selects kernels for a tensor: layout, a pending conjugation, and more. Their `raw_repr()`
(since 2.5) is a number.

torch._C._dispatch_keys, since 1.13: no public names cover all of them. Replaced by such names, if torch makes them.
"""


def fake_tensor_of(bare: Tensor, device: torch.device, attributes: Mapping[str, Any]) -> Any:
    """The same as `FakeTensor(mode, bare, device)`, in a sixth of the time: most attributes are the same for all
    tensors of a device, and are copied.

    Tensor._make_subclass, since before 1.13, and torch._C._set_warn_deprecated_on_mutable_data_ptr, since 2.4. Replaced
    by the class itself, if that gets as fast.

    Args:
        bare: a tensor on the device meta, of the right shape.
        attributes: `vars` of another fake tensor of the same mode and device.
    """
    fake = _make(FakeTensor, bare, dispatch_device=True, device_for_backend_keys=device)
    _warn_as_set(fake)  # as `FakeTensor` does, by torch's settings
    vars(fake).update(attributes)
    return fake
