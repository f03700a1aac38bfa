"""Whether a module computes each row of its inputs, a sample or a token, alone as it does among others: by trial.

NaN doesn't pass through comparisons, sorting, indices and counts: experts that take so many tokens, a gate at the
batch's median, `x / len(x)`. So copies with random weights compute random rows, forward and backward: all at once, and
one by one. Half of the rows are nearly alike, so that experts with a capacity must turn some away. The backward pass
shows hooks and functions that mix the gradients of rows.

Rows that draw random numbers can't be compared like this. Instead, half of them are exchanged for others: the rest must
stay as they are, with the same draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from lowvram.compat.torch_modes import TorchDispatchMode, without_dispatch_modes
from lowvram.compat.torch_modules import Dropout
from lowvram.compat.torch_trees import tree_leaves, tree_unflatten
from lowvram.core.changes import Look
from lowvram.core.generators import global_sources, moved, restore, same_draws_afterwards, sources_of, states_of
from lowvram.core.places import Places

FEW, MANY = 2, 8  # rows
SMALL_NUMEL = 2**16  # of the inputs of one row: many rows of such; larger ones hold many tokens, or pixels
MOST_TRAINED = 2**24  # weights whose gradients are compared, too


@final
@dataclass(frozen=True)
class Call:
    """How a method of a module is called.

    Args:
        leaves: its arguments, tensors of any device among them.
        nesting: of (arguments by position, by name).
        has_rows: for each leaf, whether it is a tensor with rows.
        dim: along which rows lie.
    """

    method: str
    leaves: Sequence[Any]
    nesting: Any
    has_rows: Sequence[bool]
    dim: int


def is_same_alone(module: nn.Module, call: Call) -> bool:
    """Whether rows computed alone are as among others, in training and in evaluation. False also where none of the
    trials comes to an end with numbers. The module isn't changed."""
    with without_dispatch_modes(), same_draws_afterwards(module), torch.enable_grad(), torch.device("cpu"):
        for dtype in (torch.float64, torch.float32):  # some code computes in one format whatever its inputs are in
            for fill in (1, 0):  # a mask hides all rows where it is one of these
                if (verdict := verdict_of(Trial(module, call, dtype, fill))) is not None:
                    return verdict and verdict_of(Trial(module, call, dtype, fill, has_bits=True)) is not False
    return False


def verdict_of(trial: Trial) -> bool | None:
    """Whether rows are the same alone; None if that can't be seen."""
    if trial.has_bits and not trial.can_have_bits():
        return None
    try:
        return trial.is_same(is_training=True) and trial.is_same(is_training=False)
    except Exception:  # of code that we don't know
        return None


class Result(NamedTuple):
    """What a run has computed, for all of its rows."""

    output: Tensor
    of_inputs: list[Tensor]  # gradients
    of_weights: list[Tensor]


@final
class Findings(AbstractContextManager[None]):
    """Around a module's run: what else it does.

    Attributes:
        eps: of the coarsest number format in which operators return floats.
        draws: the states of generators after the forward pass; None: it has drawn nothing.
        forward, backward: whether that pass changes what the module holds.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.formats = module, Formats()
        self.draws: list[Any] | None = None
        self.forward = self.backward = False

    @property
    def eps(self) -> float:
        return self.formats.eps

    def __enter__(self) -> None:
        self.formats.__enter__()
        self.before, self.look = states_of([*global_sources(), *sources_of(self.module)]), Look(Places(self.module))

    def note_forward(self) -> None:
        """Between the forward and the backward pass."""
        self.draws = [source.state() for source, _ in self.before] if moved(self.before) else None
        self.forward, self.look = bool(self.look.changes()), Look(Places(self.module))

    def __exit__(self, *error: Any) -> None:
        self.formats.__exit__(*error)
        self.backward = bool(self.look.changes())
        restore(moved(self.before))


@final
class Trial:
    """Runs of copies of a module with the same random weights and inputs.

    Args:
        fill: the value of numbers that aren't floats.
        has_bits: those with rows are 0 or 1 at random instead.
    """

    def __init__(self, module: nn.Module, call: Call, dtype: torch.dtype, fill: int, has_bits: bool = False) -> None:
        self.module, self.call, self.dtype, self.fill, self.has_bits = module, call, dtype, fill, has_bits
        self.draw, self.output = torch.Generator().manual_seed(0), torch.empty(0)
        numel = sum(
            leaf.numel() // leaf.shape[call.dim] for leaf, has in zip(call.leaves, call.has_rows, strict=True) if has
        )
        self.num_rows = MANY if numel <= SMALL_NUMEL else FEW
        self.leaves = [self.leaf_like(*each) for each in zip(call.leaves, call.has_rows, strict=True)]
        trains = sum(weight.numel() for weight in module.parameters()) <= MOST_TRAINED
        weights = {id(each): (each, self.random(each)) for each in module.parameters()}
        self.weights = {
            key: nn.Parameter(values, requires_grad=trains and each.requires_grad)
            for key, (each, values) in weights.items()
        }
        self.buffers = {id(each): self.buffer_like(each) for each in module.buffers()}

    def can_have_bits(self) -> bool:
        pairs = zip(self.leaves, self.call.has_rows, strict=True)
        return any(has_rows and not leaf.is_floating_point() for leaf, has_rows in pairs)

    # What is random

    def random(self, like: Tensor) -> Tensor:
        """The weight's shape in little memory: each row is the one before, shifted by one number."""
        if not (like.is_floating_point() or like.is_complex()) or like.numel() == 0:
            return torch.ones((), dtype=like.dtype).expand(like.shape)
        dtype = self.dtype if like.is_floating_point() else like.dtype
        numel = sum(size - 1 for size in like.shape) + 1
        if like.dim() < 2:
            return torch.rand(numel, generator=self.draw, dtype=dtype).add_(0.5).view(like.shape)
        values = torch.randn(numel, generator=self.draw, dtype=dtype) * (like.shape[0] / like.numel()) ** 0.5
        return values.as_strided(like.shape, [1] * like.dim())

    def buffer_like(self, like: Tensor) -> Tensor:
        if not like.is_meta:
            return like.detach().cpu().to(self.dtype if like.is_floating_point() else like.dtype)
        if like.is_floating_point():
            return torch.rand(like.shape, generator=self.draw, dtype=self.dtype).add_(0.5)
        return torch.full(like.shape, self.fill, dtype=like.dtype)

    def leaf_like(self, like: Any, has_rows: bool) -> Any:
        if not isinstance(like, Tensor):
            return like
        shape = list(like.shape)
        if has_rows:
            shape[self.call.dim] = self.num_rows
        if not like.is_floating_point():
            if self.has_bits and has_rows:
                return (torch.rand(shape, generator=self.draw) < 0.7).to(like.dtype)
            return torch.full(shape, self.fill, dtype=like.dtype)
        values = torch.randn(shape, generator=self.draw, dtype=self.dtype)
        if has_rows and self.num_rows > FEW:
            rows = values.movedim(self.call.dim, 0)
            half = self.num_rows // 2
            rows[half:] = rows[:1] + 0.01 * rows[half:]
        return values

    # Runs

    def is_same(self, is_training: bool) -> bool | None:
        """Whether rows are the same alone; None if there are no numbers. In evaluation nothing is asked of gradients,
        and the rows aren't computed alone where all of them together are as in training."""
        copy = self.copy(is_training)
        findings = Findings(copy)
        whole = self.run(copy, self.leaves, findings=findings)
        is_known, self.output = not is_training and torch.equal(whole.output, self.output), whole.output
        if is_known:
            return True
        if not whole.output.isfinite().all():
            return None
        if findings.backward:
            return False
        if findings.draws is not None:
            return self.is_same_beside_others(whole, findings, is_training)
        alone = list[Result]()
        for row in (slice(row, row + 1) for row in range(self.num_rows)):
            copy = self.copy(is_training) if findings.forward else copy
            alone.append(self.run(copy, self.cut(row), row))
        of_inputs = [torch.cat(each, self.call.dim) for each in zip(*(one.of_inputs for one in alone), strict=True)]
        of_weights = [torch.stack(each).sum(0) for each in zip(*(one.of_weights for one in alone), strict=True)]
        return (
            are_close([torch.cat([one.output for one in alone], self.call.dim)], [whole.output], findings.eps)
            and are_close(of_inputs, whole.of_inputs, findings.eps)
            and are_close(of_weights, whole.of_weights, findings.eps)
        )

    def is_same_beside_others(self, whole: Result, findings: Findings, is_training: bool) -> bool:
        """Whether the first half of the rows stays as it is when the others are exchanged."""
        copy, half = self.copy(is_training), slice(0, self.num_rows // 2)
        theirs = Findings(copy)
        others = [self.exchanged(*each) for each in zip(self.leaves, self.call.has_rows, strict=True)]
        other = self.run(copy, others, findings=theirs)
        if theirs.draws != findings.draws:  # how much it draws depends on the rows: what it drew can't be repeated
            return True
        ours, theirs = ([self.part(each, half) for each in (one.output, *one.of_inputs)] for one in (whole, other))
        return are_close(theirs[:1], ours[:1], findings.eps) and are_close(theirs[1:], ours[1:], findings.eps)

    def part(self, tensor: Tensor, rows: slice) -> Tensor:
        return tensor.narrow(self.call.dim, rows.start, rows.stop - rows.start)

    def cut(self, rows: slice) -> list[Any]:
        pairs = zip(self.leaves, self.call.has_rows, strict=True)
        return [self.part(leaf, rows).contiguous() if has_rows else leaf for leaf, has_rows in pairs]

    def exchanged(self, leaf: Any, has_rows: bool) -> Any:
        """With other rows in the second half, if they are floats."""
        if not has_rows or not leaf.is_floating_point():
            return leaf
        half = self.num_rows // 2
        others = torch.randn(leaf.shape, generator=self.draw, dtype=leaf.dtype)
        return torch.cat(
            [self.part(leaf, slice(0, half)), self.part(others, slice(half, self.num_rows))], self.call.dim
        )

    def run(
        self, copy: nn.Module, leaves: Sequence[Any], rows: slice | None = None, findings: Findings | None = None
    ) -> Result:
        """Run a copy forward and backward.

        Args:
            rows: which of the rows these are; None: all.
            findings: about this run, to be filled.
        """
        is_given = [has and leaf.is_floating_point() for leaf, has in zip(leaves, self.call.has_rows, strict=True)]
        given = [leaf.detach().requires_grad_() for leaf, each in zip(leaves, is_given, strict=True) if each]
        rest = iter(given)
        # Copies of the inputs: a module may write into what another has computed, but not into a leaf of the graph.
        arguments = [next(rest).clone() if each else leaf for leaf, each in zip(leaves, is_given, strict=True)]
        inputs, named = tree_unflatten(arguments, self.call.nesting)
        copy.zero_grad()
        with findings or nullcontext():
            returned = getattr(copy, self.call.method)(*inputs, **named)
            output = returned if isinstance(returned, Tensor) else returned[0]
            if findings is not None:
                findings.note_forward()
            if copy.training and output.requires_grad:
                torch.autograd.backward(output, self.gradient_like(output, rows))
        gradients = [[each.grad for each in of if each.grad is not None] for of in (given, copy.parameters())]
        return Result(output.detach(), *gradients)

    def gradient_like(self, output: Tensor, rows: slice | None) -> Tensor:
        """Random ones, the same in each run."""
        shape = list(output.shape)
        shape[self.call.dim] = self.num_rows
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
        return whole if rows is None else self.part(whole, rows)

    def copy(self, is_training: bool) -> nn.Module:
        """A copy that drops nothing."""
        weights = {key: nn.Parameter(each.detach(), each.requires_grad) for key, each in self.weights.items()}
        buffers = {key: each.clone() for key, each in self.buffers.items()}
        copy = deepcopy(self.module, {**weights, **buffers}).train(is_training)
        for module in copy.modules():
            for name, value in list(vars(module).items()):
                is_share = "drop" in name.lower() or (name == "p" and isinstance(module, Dropout))
                if is_share and isinstance(value, float):
                    setattr(module, name, 0.0)
        return copy


@final
class Formats(TorchDispatchMode):
    """Notes the coarsest number format in which operators return floats."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
                self.eps = max(self.eps, torch.finfo(leaf.dtype).eps)
        return output


def are_close(found: Sequence[Tensor], wanted: Sequence[Tensor], eps: float) -> bool:
    """Whether tensors differ by little of their mean size, in a number format with this precision."""
    if [each.shape for each in found] != [each.shape for each in wanted]:
        return False
    pairs = [(as_double(one), as_double(other)) for one, other in zip(found, wanted, strict=True) if one.numel()]
    allowed = max((float(other.nan_to_num().square().mean().sqrt()) for _, other in pairs), default=0.0) * eps**0.5
    return all(torch.allclose(one, other, rtol=0, atol=allowed, equal_nan=True) for one, other in pairs)


def as_double(values: Tensor) -> Tensor:
    return (torch.view_as_real(values.resolve_conj()) if values.is_complex() else values).double()


def with_zeros(module: nn.Module, buffers: int = 0) -> nn.Module:
    """A copy on the CPU in evaluation mode, whose parameters are zero, and whose buffers are this number. Each takes
    the memory of one number."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        zeros = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        memo[id(parameter)] = nn.Parameter(zeros, requires_grad=False)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.full((), buffers, dtype=buffer.dtype).expand(buffer.shape)
    return deepcopy(module, memo).eval()
