"""What a forward pass saves for its backward pass, for comparison with what its repetition saves.

A block may compute something else when it is computed again, in ways that no look at its modules tells: it counts in a
closure, draws from a generator that it has hidden, is given an object that was changed since, or reads weights that
were. Then the gradients would be wrong without a word. What autograd saves is all that the backward pass reads, so that
is compared, in the first steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lowvram.compat.torch_autograd import has_own_operators, saving_hooks
from lowvram.compat.torch_modes import CountingMode
from lowvram.compat.torch_modules import BatchNorm
from lowvram.compat.torch_ops import written_arguments
from lowvram.compat.torch_trees import tree_leaves
from lowvram.config.errors import Incompatible
from lowvram.core.fingerprints import Fingerprint, fingerprint

ATEN: Any = torch.ops.aten
EMPTY = frozenset(
    {ATEN.empty, ATEN.empty_like, ATEN.empty_strided, ATEN.empty_permuted, ATEN.new_empty, ATEN.new_empty_strided}
)


@final
class Witness:
    """Of a forward pass of a block and of its repetitions.

    Attributes:
        operators: what the forward pass did, beside what it saved.
    """

    def __init__(self, block: str, norms: Iterable[BatchNorm]) -> None:
        self.block = block
        self.operators = Operators(norms)
        self.saved: list[Fingerprint | None] = []

    @property
    def is_any_known(self) -> bool:
        return any(each is not None for each in self.saved)

    @contextmanager
    def of_first(self) -> Iterator[None]:
        """Around the forward pass."""

        def note(tensor: Tensor) -> None:
            self.saved.append(fingerprint(tensor) if self.operators.has_values(tensor) else None)

        with self.operators, noting(note):
            yield

    @contextmanager
    def of_repetition(self) -> Iterator[None]:
        """Around a repetition, which torch's checkpoint ends as soon as all is saved that the first pass saved.

        Raises:
            Incompatible: it has saved something else.
        """
        num_saved = 0

        def compare(tensor: Tensor) -> None:
            nonlocal num_saved
            first = self.saved[num_saved] if num_saved < len(self.saved) else None
            num_saved += 1
            again = None if first is None else fingerprint(tensor)
            if num_saved > len(self.saved) or not (first is None or again is None or first.is_same(again)):
                raise differs(self.block)

        with noting(compare):
            yield
        if num_saved < len(self.saved):
            raise differs(self.block)


def differs(block: str) -> Incompatible:
    return Incompatible(
        f"{block} doesn't compute the same when it is computed again in the backward pass, so its gradients would be"
        " wrong: it reads something that has changed since and that can't be put back, as a counter in a closure, a"
        " generator in another Python file, or its input changed through .data (choose ckpt=none)"
    )


@contextmanager
def noting(note: Callable[[Tensor], None]) -> Iterator[None]:
    """Inside it each tensor that autograd saves is noted first, then saved as by the hooks around."""
    around = saving_hooks()
    if around is None:
        yield
        return
    save, read = around

    def noted(tensor: Tensor) -> Any:
        note(tensor)
        return save(tensor)

    save_and_note: Any = torch.compiler.disable(noted)  # which would try to trace it
    with saved_tensors_hooks(save_and_note, read):
        yield


@final
class Operators(CountingMode):
    """The operators of a forward pass: which tensors have values that mean something, whether any draws, and who uses
    the statistics of BatchNorms.

    Some tensors are saved before anything is written to them, or only for the kernel of the backward pass, with gaps
    between what it reads.

    Attributes:
        draws: an operator drew from a generator of torch's.
    """

    def __init__(self, norms: Iterable[BatchNorm]) -> None:
        super().__init__()
        self.draws = False
        self.unwritten: set[int] = set()  # storages
        self.norms = list(norms)
        self.num_reads = {address(norm.running_mean): 0 for norm in self.norms if norm.running_mean is not None}
        self.num_counts = {
            address(norm.num_batches_tracked): 0 for norm in self.norms if norm.num_batches_tracked is not None
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        self.note(func, tensors_in((args, kwargs)), tensors_in(outputs))
        return outputs

    def note(self, func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        self.draws |= torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        for each in map(address, inputs):
            if each in self.num_reads:
                self.num_reads[each] += 1
            if each in self.num_counts:
                self.num_counts[each] += 1
        is_empty = getattr(func, "overloadpacket", None) in EMPTY
        is_view = bool({address(each) for each in inputs} & {address(each) for each in outputs})
        if is_view and not written_arguments(func):
            return
        self.unwritten.difference_update(map(address, inputs))
        vague = outputs if is_empty else [each for each in outputs[1:] if each.dtype is not torch.bool]
        self.unwritten.difference_update(map(address, outputs))
        self.unwritten.update(address(each) for each in vague if each.numel())

    def has_values(self, tensor: Tensor) -> bool:
        """Whether all of a tensor's values mean something."""
        return address(tensor) not in self.unwritten

    def used_otherwise(self) -> list[BatchNorm]:
        """The norms whose statistics were used otherwise than by their own forward pass, once in each."""
        return [norm for norm in self.norms if self.is_used_otherwise(norm)]

    def is_used_otherwise(self, norm: BatchNorm) -> bool:
        if norm.running_mean is None or norm.num_batches_tracked is None:
            return norm.running_mean is not None
        num_reads = self.num_reads.get(address(norm.running_mean), 0)
        return num_reads != self.num_counts.get(address(norm.num_batches_tracked), 0)


def tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def address(tensor: Tensor | None) -> int:
    """Where its memory begins; -1: it has none that could be read, as tensors that wrap others."""
    if tensor is None or has_own_operators(tensor):
        return -1
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return -1
