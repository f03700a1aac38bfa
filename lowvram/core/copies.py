"""Parameters that an optimizer updates in the place of the model's own, such as fp32 copies in host memory."""

from __future__ import annotations

from collections.abc import MutableMapping

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

_originals: MutableMapping[Tensor, nn.Parameter] = WeakIdKeyDictionary()


def register_copy(copy: nn.Parameter, original: nn.Parameter) -> nn.Parameter:
    """Remember which parameter of the model `copy` replaces, and return `copy`. Optimizers that treat some weights
    specially look at the original."""
    _originals[copy] = original
    return copy


def original(parameter: Tensor) -> Tensor:
    """The model's own parameter behind a copy; any other tensor itself."""
    return _originals.get(parameter, parameter)
