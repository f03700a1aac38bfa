"""A block that computes its tokens in chunks: one forward pass, and its backward pass.

Luo et al., "StreamBP: Memory-Efficient Exact Backpropagation for Long Sequence Training of LLMs" (2025). A token reads
those before it, in attention alone. So the forward pass computes chunk by chunk, in order, and keeps keys and values
until its end. The backward pass finds these again, computing each chunk up to its last attention. Then it computes the
chunks once more, the last one first: the gradients of earlier keys and values are kept until it is their turn.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import NamedTuple, final

import torch
from torch import Tensor

from lowvram.core.attention import replacing_attention
from lowvram.core.rounds import followed
from lowvram.core.slices import begin_of
from lowvram.knobs.tile.chunks import Chunk, Inner, Run, check_unchanged
from lowvram.knobs.tile.keys import AllKnown, Keys, Span


class TokenCuts(NamedTuple):
    """Each input is cut along a dimension of its own, into runs of tokens.

    Args:
        dims: of the inputs.
        dim: of the output.
    """

    dims: Sequence[int]
    dim: int
    spans: Sequence[Span]

    def of_inputs(self, inputs: Sequence[Tensor]) -> list[Chunk]:
        return [
            tuple(tensor.narrow(dim, begin, end - begin) for tensor, dim in zip(inputs, self.dims, strict=True))
            for begin, end in self.spans
        ]

    def of_output(self, output: Tensor) -> Sequence[Tensor]:
        return [output.narrow(self.dim, begin, end - begin) for begin, end in self.spans]

    def solid(self, chunk: Chunk) -> Chunk:
        return tuple(part.contiguous() for part in chunk)


def spans_of(num_tokens: int, most: int) -> list[Span]:
    """Runs of at most so many tokens, as even as possible, and of two at least: some models take a single token for one
    that is generated."""
    number = max(1, min(-(-num_tokens // most), num_tokens // 2))
    begins = [begin_of(num_tokens, index, number) for index in range(number + 1)]
    return [Span(begins[index], begins[index + 1]) for index in range(number)]


@final
class TokenRun(Run):
    """A run whose chunks are runs of tokens."""

    def __init__(self, inner: Inner, cuts: TokenCuts, wanted: list[bool]) -> None:
        super().__init__(inner, cuts, wanted)
        self.spans = cuts.spans
        self.passes_of = [inner.repeatable.passes() for _ in cuts.spans]  # each chunk runs again out of their order
        self.keys = Keys(cuts.spans[-1].end)

    def first(self, chunks: list[Chunk]) -> Generator[Tensor]:
        with replacing_attention(self.inner.owner, self.keys.attend):
            for number in followed(range(len(chunks))):
                with self.keys.at(self.spans[number]), self.passes_of[number].first:
                    output = self.without_graph(self.cuts.solid(chunks[number]))
                check_unchanged(self.passes_of[number].first)
                yield output
                del output
        self.keys.forget()

    def again(self, chunks: list[Chunk], inner: Callable[[Chunk], Tensor]) -> Generator[int]:
        numbers = range(len(chunks))
        with replacing_attention(self.inner.owner, self.keys.attend):
            for number in followed(numbers[: -1 if self.keys.num_attentions else 0]):
                of_chunk, again = self.keys.at(self.spans[number], stops=True), self.passes_of[number].again
                with of_chunk, again, torch.no_grad(), suppress(AllKnown):
                    inner(self.cuts.solid(chunks[number]))
            for number in followed(numbers, backwards=True):
                with self.keys.at(self.spans[number]), self.passes_of[number].again:
                    yield number
        self.keys.forget()
