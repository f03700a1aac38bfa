"""Classes derived from those of a model's modules."""

from __future__ import annotations

from torch import nn


def named_like(kind: type[nn.Module], other: type[nn.Module]) -> type[nn.Module]:
    """The class, with the other's name, by which messages and libraries know it. Type hints of its body are then read
    in the other's module: let a base class have them."""
    kind.__name__ = kind.__qualname__ = other.__name__
    kind.__module__ = other.__module__
    return kind
