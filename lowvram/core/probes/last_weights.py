"""Finds the last layers of a model by trial: those whose products are its outputs, but for what follows without
weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from lowvram.compat.torch_trees import tree_leaves

VIEWS = (  # begin the names of what lays a tensor out anew, or changes its number format
    *("TBackward", "Transpose", "Permute", "View", "Unsafe", "Reshape", "Unsqueeze", "Squeeze", "Slice", "Select"),
    *("ToCopy", "Expand", "Clone", "Alias", "AsStrided"),
)
SIDE_BY_SIDE = ("CatBackward", "StackBackward")  # begin the names of what puts outputs of several layers together


def last_weights(outputs: Any) -> list[Tensor]:
    """The parameters of two dimensions or more whose layers make the outputs, which autograd has recorded. What stands
    behind such a layer may have no weights but vectors: a softmax, a scale, a norm, a reshaping. Where an output is a
    sum of several branches, none of them is last."""
    leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    return list(dict.fromkeys(weight for leaf in leaves for weight in weights_before(leaf.grad_fn)))


def weights_before(node: Any) -> Iterator[Tensor]:
    """Those of the layers that a node of autograd's graph comes from, going back along it until there are weights, or
    several ways."""
    while node is not None:
        inputs = [each for each, _ in node.next_functions if each is not None]
        parameters = [weight for each in inputs if (weight := parameter_of(each)) is not None]
        matrices = [weight for weight in parameters if weight.dim() > 1]
        others = [each for each in inputs if parameter_of(each) is None]
        if matrices:
            yield from matrices if others else ()
            return
        if node.name().startswith(SIDE_BY_SIDE):
            for each in others:
                yield from weights_before(each)
            return
        node = others[0] if len(others) == 1 else None


def parameter_of(node: Any) -> Tensor | None:
    """The parameter that a node hands on, perhaps transposed, reshaped or in another format; None for any other."""
    while node is not None:
        if (variable := getattr(node, "variable", None)) is not None:
            return variable
        inputs = [each for each, _ in node.next_functions if each is not None]
        node = inputs[0] if len(inputs) == 1 and is_view(node) else None
    return None


def is_view(node: Any) -> bool:
    """Whether a node only lays its input out anew, or changes its number format."""
    return node.name().startswith(VIEWS)
