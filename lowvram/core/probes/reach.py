"""Whether code may mix tokens that lie farther apart than a trial of few tokens shows, as a convolution with a large
dilation, or a slice that shifts a sequence by sixteen tokens.

What a model calls is seen twice on tensors without memory: with the trial's few tokens, and with all. Dimensions whose
size differs are those of tokens.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowvram.compat.torch_trees import tree_leaves

MIXING = ("conv", "pad", "pool", "roll", "fold", "as_strided")  # parts of the names of torch's functions
CUTTING = ("__getitem__", "narrow", "cat", "concat", "concatenate", "split", "chunk", "tensor_split", "slice_scatter")
TAKING = ("index_select", "gather", "take", "take_along_dim", "index_add", "index_copy", "scatter", "scatter_add")
PRODUCTS = ("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "baddbmm", "einsum", "tensordot", "linear")
Shapes = tuple[tuple[int, ...], ...]


def shapes_in(values: Any) -> Shapes:
    return tuple(tuple(leaf.shape) for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def may_reach_far(function: str, of_few: tuple[Shapes, Shapes], of_all: tuple[Shapes, Shapes]) -> bool:
    """Whether a call may mix tokens that are farther apart than a few.

    Args:
        function: its name.
        of_few, of_all: the shapes of the tensors among its arguments, and of those that it returns.
    """
    name = function.rpartition(".")[2]
    of_inputs, of_outputs = (sizes_of_tokens(few, every) for few, every in zip(of_few, of_all, strict=True))
    inputs, outputs = (set[int]().union(*each) for each in (of_inputs, of_outputs))
    if not inputs:
        return False
    if name in PRODUCTS:  # of a matrix of tokens by tokens
        return any(len(sizes) > 1 for sizes in of_inputs)
    if name.rstrip("_") in TAKING or (name == "__getitem__" and any(of_inputs[1:])):
        return bool(of_inputs[0])
    if "conv" in name and name != "conv_tbc" and len(of_all[0]) > 1:
        return any(size > 1 for size in of_all[0][1][2:])  # the kernel's
    if any(part in name for part in MIXING):
        return True
    return name in CUTTING and not outputs <= inputs


def sizes_of_tokens(of_few: Shapes, of_all: Shapes) -> list[list[int]]:
    """Of each tensor, the sizes of its dimensions of tokens."""
    pairs = zip(of_few, of_all, strict=False)
    return [[every for size, every in zip(few, many, strict=False) if size != every] for few, many in pairs]
