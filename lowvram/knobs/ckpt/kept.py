"""Results of operators that a recomputation is given instead of computing them again.

torch's own selective checkpointing does the same, but keeps a result also when a later operator of the block changes it
in place: then the recomputation would get the changed one. Here such results are computed again. Some operators change
them through views that don't share their version, as nn.GRU does, so storages are compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from lowvram.compat.torch_autograd import version_of, without_graph
from lowvram.compat.torch_modes import CountingMode
from lowvram.compat.torch_ops import written_arguments
from lowvram.compat.torch_trees import tree_leaves, tree_map_only

IsKept = Callable[[Any, tuple[Any, ...], dict[str, Any]], bool]  # of an operator and its arguments
UNCOUNTED = {torch.ops.aten.detach.default, torch.ops.prim.device.default}  # autograd's own: not as often in each pass


class Result(NamedTuple):
    """What an operator returned."""

    output: Any
    versions: list[int]  # of its tensors

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in tree_leaves(self.output) if isinstance(leaf, Tensor)]

    def is_intact(self) -> bool:
        return self.versions == [version_of(tensor) for tensor in self.tensors]


@final
class Kept:
    """The results of one forward pass, by the operator and by how many of its calls came before."""

    def __init__(self) -> None:
        self.results: dict[tuple[Any, int], Result] = {}

    def keep(self, place: tuple[Any, int], output: Any) -> None:
        output = tree_map_only(Tensor, without_graph, output)
        result = Result(output, [])
        result.versions.extend(map(version_of, result.tensors))
        self.results[place] = result

    def drop_written(self, written: list[Tensor]) -> None:
        """Drop what lies in the memory of tensors that are about to be changed in place."""
        storages = {id_of_storage(tensor) for tensor in written}
        lost = [place for place, result in self.results.items() if storages & set(map(id_of_storage, result.tensors))]
        for place in lost:
            del self.results[place]

    def take(self, place: tuple[Any, int]) -> Any:
        """A result, which is then forgotten; None if there is none, or if it was changed after the block returned."""
        result = self.results.pop(place, None)
        return result.output if result is not None and result.is_intact() else None


class Counting(CountingMode):
    """Counts the calls of each operator in one pass."""

    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self.kept = kept
        self.counts: dict[Any, int] = defaultdict(int)

    def __enter__(self) -> Any:
        self.counts.clear()
        return super().__enter__()

    def place_of(self, operator: Any) -> tuple[Any, int]:
        self.counts[operator] += 1
        return operator, self.counts[operator]


@final
class Keeping(Counting):
    """Around the forward pass: keeps results."""

    def __init__(self, kept: Kept, is_kept: IsKept) -> None:
        super().__init__(kept)
        self.is_kept = is_kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in UNCOUNTED:
            return func(*args, **kwargs)
        place = self.place_of(func)
        if written := list(written_by(func, args, kwargs)):
            self.kept.drop_written(written)
        output = func(*args, **kwargs)
        if self.is_kept(func, args, kwargs):
            self.kept.keep(place, output)
        return output


@final
class Using(Counting):
    """Around the recomputation: gives kept results in place of computing them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in UNCOUNTED:
            return func(*args, **(kwargs or {}))
        output = self.kept.take(self.place_of(func))
        return func(*args, **(kwargs or {})) if output is None else output


def written_by(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operator changes in place."""
    for place, name in written_arguments(operator):
        value = args[place] if place < len(args) else kwargs.get(name)
        yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def id_of_storage(tensor: Tensor) -> int:
    return id(tensor.untyped_storage())
