"""Whether a step that has failed has changed a model's weights, or else a snapshot can still be of the step before.

Tensors count their changes in place, but not those by fused kernels of optimizers. So each optimizer tells when it
begins.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowvram.compat.torch_versions import version

MARK = "_lowvram_untouched"  # an attribute of errors
_num_begun = 0  # steps of optimizers in this process


class Untouched:
    """What a model holds now, for `is_still` to compare with."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._weights, self._num_begun = model, versions(list(model.parameters())), _num_begun
        self._buffers = dict(model.named_buffers())
        self._of_buffers = versions(list(self._buffers.values()))

    def is_still(self, error: BaseException) -> bool:
        """Whether neither a weight nor the optimizer's state was changed until `error` was raised."""
        is_equal = versions(list(self._model.parameters())) == self._weights
        return is_equal and (_num_begun == self._num_begun or MARK in vars(error))

    def changed_buffers(self) -> list[str]:
        """The names of the buffers that were changed, such as running statistics."""
        now = versions(list(self._buffers.values()))
        return [name for name, old, new in zip(self._buffers, self._of_buffers, now, strict=True) if old != new]


@torch.no_grad()
def versions(tensors: list[Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else version(tensor) for tensor in tensors]


def note_begun(*_: Any) -> None:
    """The hook of each optimizer before its step."""
    global _num_begun
    _num_begun += 1


def marking(optimizer: Optimizer) -> Optimizer:
    """The optimizer, whose step marks an error that it raised before it changed anything."""
    step = optimizer.step

    def marking_step(*args: Any) -> Any:
        before = held_by(optimizer)
        try:
            return step(*args)
        except Exception as error:
            if held_by(optimizer) == before and not any(group.get("fused") for group in optimizer.param_groups):
                setattr(error, MARK, True)
            raise

    optimizer.step = marking_step  # pyright: ignore[reportAttributeAccessIssue]
    return optimizer


def held_by(optimizer: Optimizer) -> list[Any]:
    """The versions of an optimizer's weights and state, and its plain values."""
    groups = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    values = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [value for value in values if isinstance(value, Tensor)]
    plain = [value for value in values if isinstance(value, int | float | str)]
    return [versions([*groups, *tensors]), plain]
