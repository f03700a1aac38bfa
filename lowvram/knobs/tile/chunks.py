"""A function of tensors that computes them in chunks, keeps only its inputs, and computes each chunk again in the
backward pass."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from lowvram.compat.torch_autograd import version_of
from lowvram.config.errors import Incompatible
from lowvram.core.kind import Kind
from lowvram.core.ledger import announce
from lowvram.core.recomputed import Surroundings, has_backward, inputs_kept, itself, recomputed_later
from lowvram.core.repeat import First, Repeatable
from lowvram.core.rounds import followed


@final
class Inner(nn.Module):
    """What a module computed before it was tiled, as a module around it: `functional_call` can give it other tensors in
    the place of its parameters."""

    def __init__(self, owner: Repeatable, call: Any) -> None:
        super().__init__()
        self.owner, self.call, self.repeatable = owner.module, call, owner

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.call(*inputs)


def in_chunks(inner: Inner, chunks: Chunks, inputs: Sequence[Tensor]) -> Tensor:
    """The output of a function for all inputs, computed chunk by chunk. Only the inputs are kept, and the backward
    pass computes each chunk again.

    Raises:
        Incompatible: the function changes what its modules hold, which it would do for each chunk, or its inputs.
    """
    if torch.compiler.is_compiling():  # which sums gradients inside its graph
        call, pieces = inner.call, map(chunks.solid, chunks.of_inputs(inputs))
        if not has_backward(inner, inputs):
            return torch.cat([call(*piece) for piece in pieces], chunks.dim)
        return torch.cat([checkpoint(call, *piece, use_reentrant=False) for piece in pieces], chunks.dim)  # pyright: ignore[reportArgumentType]
    return keeping_inputs(Run(inner, chunks, [tensor.requires_grad for tensor in inputs]), inputs)


def keeping_inputs(run: Run, inputs: Sequence[Tensor]) -> Tensor:
    """The output of a run, of which only the inputs are kept for the backward pass."""
    trained = [weight for weight in run.weights.values() if weight.requires_grad]
    anchor = None if any(run.wanted) else next(iter(trained), None)
    with inputs_kept(run.inner.owner, inputs):
        return Chunked.apply(run, *Keep.apply(run, anchor, *inputs), *trained)  # pyright: ignore[reportReturnType, reportGeneralTypeIssues]


@final
class Keep(torch.autograd.Function):
    """Keeps the inputs for the backward pass of `Chunked`, and passes them on.

    A function of its own, so that the inputs are saved *before* `Chunked` runs: torch's checkpoint ends the
    recomputation of a block as soon as all that the block had saved is there again. Where `Chunked` comes last, as an
    MLP does in most blocks, the recomputation of the block leaves it out, so it runs twice in all, not three times.
    """

    @staticmethod
    def forward(ctx: Any, run: Run, anchor: Tensor | None, *inputs: Tensor) -> tuple[Tensor, ...]:
        """`anchor`: a tensor that requires a gradient, where no input does: else torch would save nothing."""
        ctx.save_for_backward(*inputs)
        run.kept_by = ctx
        return inputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, *gradients


@final
class Chunked(torch.autograd.Function):
    """`inner`, chunk by chunk. Its backward pass sums the gradients of weights over the chunks, so that each weight
    gets its gradient once: hooks that wait for it, as those of stepping=in_backward, are called once."""

    @staticmethod
    def forward(ctx: Any, run: Run, *tensors: Tensor) -> Tensor:
        ctx.run = run
        return run.forward(tensors[: len(run.wanted)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, *ctx.run.backward(gradient)


Chunk = tuple[Tensor, ...]  # of several tensors, the same part of each


class Cuts(Protocol):
    """How the inputs and the output of a function are cut.

    Attributes:
        dim: along which the output is.
    """

    @property
    def dim(self) -> int: ...

    def of_inputs(self, inputs: Sequence[Tensor]) -> list[Chunk]:
        """The chunks of all inputs together, as views."""
        ...

    def of_output(self, output: Tensor) -> Sequence[Tensor]:
        """Those of the output, as views."""
        ...

    def solid(self, chunk: Chunk) -> Chunk:
        """A chunk, contiguous as the whole tensors are: some modules reshape it by `view`."""
        ...


class Chunks(NamedTuple):
    """All tensors are cut along the same dimension, into pieces of `size`; the last one may be smaller."""

    dim: int
    size: int

    def of_inputs(self, inputs: Sequence[Tensor]) -> list[Chunk]:
        return list(zip(*map(self.of_output, inputs), strict=True))

    def of_output(self, output: Tensor) -> Sequence[Tensor]:
        return output.split(self.size, self.dim)

    def solid(self, chunk: Chunk) -> Chunk:
        return chunk if self.dim == 0 else tuple(part.contiguous() for part in chunk)


def joined(parts: Iterable[Tensor], dim: int, length: int) -> Tensor:
    """One tensor of chunks, `length` long along `dim`. Each chunk is freed as soon as it is copied."""
    whole: Any = None
    first = 0
    for part in parts:
        if whole is None:
            shape = (*part.shape[:dim], length, *part.shape[dim + 1 :])
            layout = memory_format_of(part)
            whole = torch.empty(shape, dtype=part.dtype, device=part.device, memory_format=layout)
        whole.narrow(dim, first, part.shape[dim]).copy_(part)
        first += part.shape[dim]
        del part
    return whole


def memory_format_of(tensor: Tensor) -> torch.memory_format:
    is_images = tensor.dim() == 4 and not tensor.is_contiguous()
    is_channels_last = is_images and tensor.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_channels_last else torch.contiguous_format


class Run:
    """One forward pass in chunks, and its backward pass."""

    def __init__(self, inner: Inner, cuts: Cuts, wanted: list[bool]) -> None:
        self.inner, self.cuts, self.wanted = inner, cuts, wanted
        self.weights = dict(inner.named_parameters())
        self.is_trained = {
            name: weight.requires_grad for name, weight in self.weights.items()
        }  # the model may change it
        self.versions = {name: version_of(weight) for name, weight in self.weights.items()}
        self.has_graph = torch.is_grad_enabled()
        self.kept_by: Any = None  # the autograd node that has saved the inputs
        self.surroundings: Surroundings | None = None
        self.passes = inner.repeatable.passes()

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        self.surroundings = Surroundings(inputs[0])
        chunks = self.cuts.of_inputs(inputs)
        length = sum(chunk[0].shape[self.cuts.dim] for chunk in chunks)
        with recomputed_later(), self.surroundings.autocast(), closing(self.first(chunks)) as outputs:
            return joined(outputs, self.cuts.dim, length)

    def first(self, chunks: list[Chunk]) -> Generator[Tensor]:
        """The outputs of all chunks, in order."""
        with self.passes.first:
            for chunk in followed(chunks):
                yield self.without_graph(self.cuts.solid(chunk))
        check_unchanged(self.passes.first)

    def without_graph(self, chunk: Chunk) -> Tensor:
        """The output of a chunk. It is computed with a graph where there will be a backward pass, as code asks for
        that, and torch chooses kernels by it. The graph of a chunk keeps its tensors, as in the backward pass, where
        more is alive; other knobs don't see them. (Itself, a tensor would keep its graph alive.)"""
        with torch.set_grad_enabled(self.has_graph), saved_tensors_hooks(Tensor.detach, itself):
            return self.inner(*self.leaves(chunk)).detach()

    def leaves(self, chunk: Chunk) -> list[Tensor]:
        """The inputs of a chunk, with a graph of their own."""
        return [part.detach().requires_grad_(wanted) for part, wanted in zip(chunk, self.wanted, strict=True)]

    def backward(self, gradient: Tensor) -> list[Tensor | None]:
        """The gradients of inputs and weights; None where none is wanted, or where `inner` doesn't use the tensor."""
        assert self.surroundings is not None
        self.check_weights()
        inputs = self.kept_by.saved_tensors
        wanted = list(zip(inputs, self.wanted, strict=True))
        found = [torch.zeros_like(tensor) if is_wanted else None for tensor, is_wanted in wanted]
        sums = {name: GradientSum(self.weights[name]) for name, is_trained in self.is_trained.items() if is_trained}
        frozen = {
            name: weight.detach() for name, weight in self.weights.items() if name not in sums and weight.requires_grad
        }
        inner = partial(functional_call, self.inner, frozen | {name: total.stand_in for name, total in sums.items()})
        chunks, of_output = self.cuts.of_inputs(inputs), self.cuts.of_output(gradient)
        given_or_found = [given if each is None else each for given, each in zip(inputs, found, strict=True)]
        of_inputs = self.cuts.of_inputs(given_or_found)
        with self.surroundings.autocast(), torch.enable_grad(), closing(self.again(chunks, inner)) as numbers:
            for number in numbers:
                leaves = self.leaves(self.cuts.solid(chunks[number]))
                [of_chunk] = self.cuts.solid((of_output[number],))
                torch.autograd.backward(inner(tuple(leaves)), of_chunk)
                for whole, leaf in zip(of_inputs[number], leaves, strict=True):
                    if leaf.grad is not None:
                        whole.copy_(leaf.grad)
        return [*found, *(total.result() for total in sums.values())]

    def again(self, chunks: list[Chunk], inner: Callable[[Chunk], Tensor]) -> Generator[int]:
        """The numbers of the chunks, in the order in which their gradients are computed. The caller computes a chunk
        before it asks for the next one.

        Args:
            inner: the function, with weights whose gradients are summed.
        """
        with self.passes.again:
            yield from followed(range(len(chunks)))

    def check_weights(self) -> None:
        """Raises Incompatible if a weight isn't any more what it was in the forward pass."""
        for name, weight in self.weights.items():
            if version_of(weight) != self.versions[name]:
                raise Incompatible(
                    f"{name.removeprefix('owner.')} of {type(self.inner.owner).__name__} was changed after it had been"
                    " used, and tile has the backward pass use it once more; stepping=in_backward changes a weight once"
                    " its gradient is computed, also where a pass with it frozen is still to come: choose"
                    " stepping=after_backward or tile=none"
                )


def check_unchanged(first: First) -> None:
    """Raises Incompatible if a forward pass has changed what its modules hold."""
    if first.changes:
        raise Incompatible(
            f"{first.changes[0].what} changes in each forward pass, and tile has a part take several, one for each"
            " chunk: leave tile=none, and choose ckpt and accum"
        )


@final
class GradientSum:
    """Sums the gradients of a weight over chunks, in fp32 or wider. Each is freed as soon as it is added."""

    def __init__(self, weight: Tensor) -> None:
        self.stand_in = weight.detach().requires_grad_()  # the same memory, but hooks of the weight don't see it
        self.stand_in.register_post_accumulate_grad_hook(self.add)
        self.exact = torch.promote_types(weight.dtype, torch.float32)
        self.total: Tensor | None = None

    @torch.no_grad()
    def add(self, stand_in: Tensor) -> None:
        gradient, stand_in.grad = stand_in.grad, None
        assert gradient is not None
        if self.total is None:
            self.total = announce(gradient.to(self.exact), Kind.GRADIENTS)
        else:
            self.total.add_(gradient)

    def result(self) -> Tensor | None:
        """The sum in the weight's dtype. It belongs to the caller alone."""
        total, self.total = self.total, None
        return None if total is None else total.to(self.stand_in.dtype)
