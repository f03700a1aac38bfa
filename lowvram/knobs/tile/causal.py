"""Blocks whose tokens meet in causal attention alone: found by trial, and computed in chunks of tokens.

A model with random weights computes short samples, forward and backward: at once, and with its blocks in chunks. That
its code takes the same way with samples of the real length is seen on tensors without memory
(core/probes/token_trial.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from inspect import Signature, signature
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from lowvram.compat.torch_trees import tree_flatten, tree_leaves, tree_map_only
from lowvram.compat.transformers import known_values_readable
from lowvram.config.errors import BadInput, Incompatible
from lowvram.config.texts import first_line
from lowvram.core.fact import ModelFact
from lowvram.core.probes.alone import are_close
from lowvram.core.probes.calls import Use, uses_of
from lowvram.core.probes.draws import NO_RANDOMNESS
from lowvram.core.probes.runs import Told, positions, ways_to_tell
from lowvram.core.probes.separate_samples import SEPARATE_SAMPLES
from lowvram.core.probes.token_trial import (
    ALL,
    BlockUse,
    Found,
    Path,
    Paths,
    Samples,
    check_way,
    first_of,
    has_tokens,
    is_same_by_trial,
    length_of,
    length_of_trial,
    watch,
)
from lowvram.core.repeat import Repeatable
from lowvram.core.structure import Probe, Structure
from lowvram.knobs.tile.arguments import Arguments
from lowvram.knobs.tile.chunks import Inner, keeping_inputs
from lowvram.knobs.tile.keys import MEND
from lowvram.knobs.tile.token_run import TokenCuts, TokenRun, spans_of

FEW, TILE, TILES = 7, 3, 3  # tokens of a sample, and of a chunk, in a trial, and so many chunks
NO_TENSOR = -2
SHARED = -1  # by all tokens


class Called(NamedTuple):
    """How a block is called.

    Args:
        dims: of each argument, as leaves, the dimension of tokens, or SHARED or NO_TENSOR.
        dim: the same of the tensor that it returns.
        num_outputs: 0 if it returns that alone; else the length of a tuple that begins with it and else holds None.
    """

    dims: tuple[int, ...]
    dim: int
    num_outputs: int


class Verdict(NamedTuple):
    """How tokens can be computed in chunks; or why they can't.

    Args:
        blocks: by their names, how they are called.
        told: how the model is told the positions of its tokens; None: it needn't be.
        place: of the first of the model's arguments, as leaves, that has tokens.
    """

    blocks: Mapping[str, Called]
    told: Told | None = None
    place: int = 0
    trouble: str | None = None

    def tell(self, model: nn.Module) -> ExitStack:
        """Have the model be told positions, until the stack is closed."""
        undo, told = ExitStack(), self.told

        def with_positions(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
            tokens = tree_leaves((inputs, named))[self.place]
            assert told is not None
            return inputs, {**named, told.argument: positions(told.how, slice(0, tokens.shape[1]), tokens.device)}

        if told is not None:
            undo.callback(model.register_forward_pre_hook(with_positions, with_kwargs=True).remove)
        return undo


@final
@dataclass(frozen=True)
class CausalBlocks(Probe[Verdict]):
    """The blocks of a model whose tokens meet in their causal attention alone."""

    def find(self, known: Structure) -> Verdict:
        try:
            inputs = known.example(2)
            number = length_of(known, inputs, Incompatible)
            if number <= TILE:
                raise Incompatible(f"samples have {number} tokens")
            return Attempts(known, inputs, number).verdict()
        except (BadInput, Incompatible) as error:
            return Verdict({}, trouble=f"{error}: leave tile=none, or choose tile=blocks")


@final
class Attempts:
    """Trials of a model, which is told positions in one way or another.

    Args:
        number: how many tokens the inputs have.
    """

    def __init__(self, known: Structure, inputs: Any, number: int) -> None:
        self.known, self.inputs, self.number = known, inputs, number
        self.few = length_of_trial(known, number, FEW)
        given = self.uses(known.call, inputs, [""])[""].leaves
        self.place = next((place for place, leaf in enumerate(given) if has_tokens(leaf, number)), 0)

    def verdict(self) -> Verdict:
        """Raises Incompatible if the model computes something else in chunks, or BadInput."""
        ways = [*ways_to_tell(self.known, self.inputs)]
        is_training = NO_RANDOMNESS.lack(self.known) is None
        for told in sorted(ways, key=lambda way: way is not None):
            verdict = self.called(told)
            compare = partial(is_same, verdict=verdict)
            if is_same_by_trial(self.known, self.inputs, self.number, self.few, compare, is_training):
                check_way(self.known, self.inputs, self.number, self.few, partial(self.paths, verdict), Incompatible)
                return verdict
        raise Incompatible(
            "this model doesn't compute the same: tokens must meet in its blocks, in torch's"
            " scaled_dot_product_attention with is_causal=True alone, and a block must be given its tokens' positions"
        )

    def called(self, told: Told | None) -> Verdict:
        """How the blocks are called, as samples of few tokens and of fewer show. Raises Incompatible where that can't
        be told."""
        known = self.known
        name_of = {module: name for name, module in known.model.named_modules()}
        names, unproved = [name_of[block] for block in known.blocks], Verdict({}, told, self.place)

        def call(model: nn.Module, inputs: Any) -> Any:
            with unproved.tell(model):
                return known.call(model, inputs)

        short = [self.first(self.inputs, length) for length in (self.few, self.few - 1)]
        of_few, of_fewer = (self.uses(call, each, names) for each in short)
        blocks = {name: compared(of_few[name], of_fewer[name], self.few) for name in names if name in of_few}
        if not blocks:
            raise Incompatible("this model calls none of its blocks")
        return unproved._replace(blocks=blocks)

    def uses(self, call: Callable[[nn.Module, Any], Any], inputs: Any, names: list[str]) -> dict[str, Use]:
        try:
            with known_values_readable(lambda value: True):  # else masks that hide nothing would be made
                return uses_of(self.known.model, call, inputs, names, guesses=True)
        except Exception as error:
            raise Incompatible(f"this model can't be tried without memory ({first_line(error)})") from None

    def first(self, inputs: Any, length: int) -> Any:
        """The inputs with so many of their tokens."""
        return tree_map_only(Tensor, lambda leaf: first_of(leaf, self.number, length), inputs)

    def paths(self, verdict: Verdict, copy: nn.Module, fake: Any, length: int) -> Paths:
        """What a model calls, and what it calls in three chunks."""
        given, uses = self.first(fake, length), list[BlockUse]()
        with Path() as whole:
            for name in verdict.blocks:
                watch(copy.get_submodule(name), whole, uses)
            self.known.call(copy, given)
        mixed = [call for use in uses for call in use.calls]
        forwards = tile_all(copy, verdict.blocks, -(-length // TILES))
        with Path() as tiled, verdict.tell(copy):
            self.known.call(copy, given)
        for block, forward in forwards.items():
            block.forward = forward
        return Paths([whole.calls, tiled.calls], mixed)


def lacks_causal_blocks(known: Structure) -> str | None:
    """Of blocks that compare samples, which lack more, their user is told that alone."""
    return None if SEPARATE_SAMPLES.lack(known) else known.get(CausalBlocks()).trouble


CAUSAL_BLOCKS = ModelFact("the tokens meet in the blocks' causal attention alone", lacks_causal_blocks)


def compared(use: Use, of_fewer: Use, few: int) -> Called:
    """How a block is called. Raises Incompatible."""
    dims = tuple(dim_of(*pair, few) for pair in zip(use.leaves, of_fewer.leaves, strict=False))
    (output, *others), (fewer, *_) = (
        each.output if isinstance(each.output, tuple) else [each.output] for each in (use, of_fewer)
    )
    dim = dim_of(output, fewer, few)
    if len(use.leaves) != len(of_fewer.leaves) or not any(each >= 0 for each in dims):
        raise Incompatible("its blocks aren't given tensors of tokens")
    if dim < 0 or any(each is not None for each in others):
        raise Incompatible("its blocks don't return one tensor with a row for each token")
    return Called(dims, dim, 1 + len(others) if isinstance(use.output, tuple) else 0)


def dim_of(leaf: Any, of_fewer: Any, few: int) -> int:
    """The dimension of tokens. Raises Incompatible where there are several, as those of a mask."""
    if not isinstance(leaf, Tensor) or not isinstance(of_fewer, Tensor):
        return NO_TENSOR
    sizes = zip(leaf.shape, of_fewer.shape, strict=False)
    dims = [dim for dim, (size, fewer) in enumerate(sizes) if size != fewer]
    if len(dims) > 1 or leaf.dim() != of_fewer.dim() or any(leaf.shape[dim] != few for dim in dims):
        shape = tuple(leaf.shape)
        raise Incompatible(f"its blocks are given a tensor of shape {shape} for {few} tokens, as a mask is")
    return dims[0] if dims else SHARED


def is_same(samples: Samples, whole: Found, eps: float, verdict: Verdict) -> bool:
    """Whether blocks that compute few tokens at a time give the same outputs, and the same gradients."""

    def tile(copy: nn.Module) -> None:
        tile_all(copy, verdict.blocks, TILE)
        verdict.tell(copy)

    found = samples.computed(ALL, tile)
    return (
        found.gradients.keys() == whole.gradients.keys()
        and are_close(found.outputs, whole.outputs, eps)
        and are_close(found.of_inputs, whole.of_inputs, eps)
        and are_close([*found.gradients.values()], [whole.gradients[name] for name in found.gradients], eps)
    )


def tile_all(model: nn.Module, blocks: Mapping[str, Called], tokens: int) -> dict[nn.Module, Any]:
    """Have blocks compute so many tokens of each sample at a time. Returns their forward passes before."""
    before = {model.get_submodule(name): model.get_submodule(name).forward for name in blocks}
    for (block, forward), how in zip(before.items(), blocks.values(), strict=True):
        block.forward = Tiled(Repeatable(block), forward, how, tokens)
    return before


@final
@dataclass(frozen=True, eq=False)
class Tiled:
    """A block that computes its tokens in chunks. With at most `tokens` tokens it is as it was."""

    repeatable: Repeatable
    call: Any
    how: Called
    tokens: int

    @property
    def __signature__(self) -> Signature:
        return signature(self.call)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        leaves, nesting = tree_flatten((inputs, named))
        if not self.is_as_tried(leaves):
            return self.call(*inputs, **named)
        places = [place for place, dim in enumerate(self.how.dims) if dim >= 0]
        arguments, dims = Arguments(leaves, nesting, places, self.how.num_outputs), [self.how.dims[at] for at in places]
        tensors = arguments.tensors
        spans = spans_of(tensors[0].shape[dims[0]], self.tokens)
        if len(spans) == 1:
            return self.call(*inputs, **named)
        inner, cuts = Inner(self.repeatable, arguments.given_chunks(self.call)), TokenCuts(dims, self.how.dim, spans)
        run = TokenRun(inner, cuts, [tensor.requires_grad for tensor in tensors])
        return arguments.returned(keeping_inputs(run, tensors))

    def is_as_tried(self, leaves: list[Any]) -> bool:
        """Whether it is called as in the trial; False where it isn't, and nothing trains.

        Raises:
            Incompatible: something trains.
        """
        dims = self.how.dims
        is_so = len(leaves) == len(dims) and all(
            isinstance(leaf, Tensor) == (dim != NO_TENSOR) for leaf, dim in zip(leaves, dims, strict=False)
        )
        if not is_so and torch.is_grad_enabled():
            raise Incompatible(
                f"tile=tokens needs that {type(self.repeatable.module).__name__} is called as in the trial of it, but"
                f" it is given other tensors, such as a mask of padding: {MEND}"
            )
        return is_so
