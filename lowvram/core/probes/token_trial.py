"""Trials of models that compute a sample's tokens otherwise than all at once: with random weights, few tokens, forward
and backward.

That a model's code takes the same way with samples of the real length is seen on tensors without memory: which
functions of torch's it calls, in which order, and with which settings. A window of attention, for example, shows there
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lowvram.compat.torch_modes import without_dispatch_modes
from lowvram.compat.torch_trees import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from lowvram.compat.transformers import known_values_readable
from lowvram.config.errors import BadInput, Incompatible
from lowvram.config.texts import first_line
from lowvram.core.generators import same_draws_afterwards
from lowvram.core.probes.alone import Call, Formats, Trial
from lowvram.core.probes.fake_pass import fake_pass
from lowvram.core.probes.reach import Shapes, may_reach_far, shapes_in
from lowvram.core.rounds import three_followed
from lowvram.core.structure import Structure

LARGE = 2**24  # weights of a model of which each kind of block is tried once
MOST_STACKED = 2**26  # weights of a layer
MOST_TOKENS = 256  # of a trial of a small model: as many as are there
MOST_NUMEL = 2**22  # weights of a small model
ALL = slice(None)
Refused = Callable[[str], Incompatible]  # makes the error of what is wrong


def has_tokens(tensor: Any, number: int) -> bool:
    return isinstance(tensor, Tensor) and tensor.dim() > 1 and tensor.shape[1] == number


def length_of(known: Structure, inputs: Any, refused: Refused) -> int:
    """How many tokens a sample has. Raises Incompatible where the model returns nothing for each token.

    Args:
        refused: of what is wrong.
    """
    try:
        outputs = fake_pass(known.model, lambda copy, fake: known.call(copy, fake), inputs)
    except (BadInput, Incompatible):
        raise
    except Exception as error:
        raise refused(f"this model can't be tried without memory ({first_line(error)})") from None
    sizes = {each.shape[1] if each.dim() > 2 else 0 for each in tree_leaves(outputs) if isinstance(each, Tensor)}
    number = sizes.pop() if len(sizes) == 1 else 0
    if not number or not any(has_tokens(leaf, number) for leaf in tree_leaves(inputs)):
        raise refused("this model doesn't return a row for each token of what it is given")
    return number


def length_of_trial(known: Structure, number: int, least: int) -> int:
    """How many of a sample's tokens a trial is given: all, if they and the model are few; else `least`."""
    is_small = sum(weight.numel() for weight in known.model.parameters()) <= MOST_NUMEL
    return number if is_small and number <= MOST_TOKENS else min(number, least)


class Paths(NamedTuple):
    """What a model calls.

    Args:
        kinds: for each way to compute its tokens.
        mixed: of one of them, by all that must not mix tokens but in attention.
    """

    kinds: list[list[Seen]]
    mixed: list[Seen]


def check_way(
    known: Structure,
    inputs: Any,
    number: int,
    few: int,
    paths: Callable[[nn.Module, Any, int], Paths],
    refused: Refused,
) -> None:
    """Raises Incompatible where the model's code takes another way with samples of the real length than with the few
    tokens of the trial, or may mix tokens that are farther apart.

    Args:
        paths: of a copy, its inputs without memory, and how many of their tokens it is to be given: what it calls.
        refused: of what is wrong.
    """

    def of_both(copy: nn.Module, fake: Any) -> list[Paths]:
        return [paths(copy, fake, length) for length in (few, number)]

    try:
        with known_values_readable(lambda value: True):
            of_few, of_all = fake_pass(known.model, of_both, inputs)
    except (BadInput, Incompatible):
        raise
    except Exception as error:
        raise refused(f"this model can't be tried without memory ({first_line(error)})") from None
    if of_few.kinds != of_all.kinds:
        raise refused(
            f"with {number} tokens this model computes otherwise than with {few}, as with a window of attention"
        )
    for one, other in zip(of_few.mixed, of_all.mixed, strict=True):
        if few < number and may_reach_far(one.function, one.shapes, other.shapes):
            name = one.function.rpartition(".")[2]
            raise refused(
                f"this model calls torch's {name}, which may mix tokens that are farther apart than the {few}"
                " of a trial"
            )


def is_same_by_trial(
    known: Structure,
    inputs: Any,
    number: int,
    few: int,
    compare: Callable[[Samples, Found, float], bool],
    is_training: bool = True,
) -> bool:
    """Whether samples of `few` tokens are computed as at once. False also where a trial fails. The model isn't changed.

    Args:
        inputs: of two samples of `number` tokens.
        compare: of the samples, what is computed of them at once, and the precision: whether that is the same.
        is_training: whether the model is in training mode, in which it must draw nothing.

    Raises:
        BadInput, Incompatible: it can't be had so, and why.
    """
    model = known.model
    with (
        without_dispatch_modes(),
        three_followed(None),
        same_draws_afterwards(model),
        torch.enable_grad(),
        torch.device("cpu"),
    ):
        for dtype in (torch.float64, torch.float32):  # some code computes in one format whatever its inputs are in
            try:
                samples, formats = Samples(known, inputs, number, few, dtype, is_training), Formats()
                with formats:
                    whole = samples.computed(ALL)
                if all(each.isfinite().all() for each in whole.outputs):
                    return compare(samples, whole, formats.eps)
            except (BadInput, Incompatible):
                raise
            except Exception:  # of code that we don't know
                continue
    return False


@dataclass(frozen=True)
class Found:
    """What a copy has computed.

    Args:
        gradients: of its parameters, by their names.
    """

    outputs: list[Tensor]
    of_inputs: list[Tensor]
    gradients: dict[str, Tensor]


@final
class Samples:
    """Two random samples of few tokens, for copies of a model with the same random weights."""

    def __init__(
        self, known: Structure, inputs: Any, number: int, few: int, dtype: torch.dtype, is_training: bool = True
    ) -> None:
        self.known, self.few, self.is_training = known, few, is_training
        leaves, self.nesting = tree_flatten(inputs)
        self.with_tokens = [has_tokens(leaf, number) for leaf in leaves]
        short = [leaf[:, :few] if cut else leaf for leaf, cut in zip(leaves, self.with_tokens, strict=True)]
        self.trial = Trial(known.model, Call("forward", short, self.nesting, [False] * len(short), 0), dtype, 1)
        for weight in known.model.parameters():
            like = self.trial.weights[id(weight)]
            if weight.dim() > 2 and weight.numel() <= MOST_STACKED:  # products of stacks of matrices want whole ones
                like.data = like.detach().contiguous()
            if weight.dim() < 2:  # of a large model these alone, so that there is a backward pass
                like.requires_grad_(weight.requires_grad and weight.is_floating_point())
        for name, buffer in known.model.named_buffers():
            if buffer.is_meta and not buffer.is_floating_point() and "position" in name:
                counted = torch.arange(buffer.shape[-1], dtype=buffer.dtype)
                self.trial.buffers[id(known.model.get_buffer(name))] = counted.expand(buffer.shape).clone()
        is_large = sum(weight.numel() for weight in known.model.parameters()) > LARGE
        self.repeated = repeated_blocks(known, inputs, number, few) if is_large else {}
        self.leaves = [self.with_values(*each) for each in zip(short, self.trial.leaves, strict=True)]

    def with_values(self, given: Any, random: Any) -> Any:
        """Random floats; numbers of tokens where there are only zeros; else as they are, such as masks."""
        if not isinstance(given, Tensor) or given.is_floating_point() or given.dtype is torch.bool or given.any():
            return random if isinstance(given, Tensor) and given.is_floating_point() else given
        return (torch.rand(given.shape, generator=self.trial.draw) < 0.5).to(given.dtype)

    def computed(
        self,
        mine: slice,
        change: Callable[[nn.Module], None] = lambda copy: None,
        around: Callable[[nn.Module], AbstractContextManager[None]] = lambda copy: nullcontext(),
        given: slice | None = None,
    ) -> Found:
        """What a copy computes of some of the tokens, forward and backward.

        Args:
            mine: which.
            change: is made of the copy.
            around: of the copy, while it computes.
            given: the tokens that it is given; None: the same.
        """
        copy = self.trial.copy(self.is_training)
        change(copy)
        for name, hand_on in self.repeated.items():
            copy.get_submodule(name).forward = hand_on
        taken = mine if given is None else given
        leaves = [leaf[:, taken] if cut else leaf for leaf, cut in zip(self.leaves, self.with_tokens, strict=True)]
        floats = {
            place: leaf.detach().clone().requires_grad_()
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and leaf.is_floating_point()
        }
        # Copies: a module may write into what another has computed, but not into a leaf of the graph.
        arguments = [floats[place].clone() if place in floats else leaf for place, leaf in enumerate(leaves)]
        with around(copy):
            outputs = self.known.call(copy, tree_unflatten(arguments, self.nesting))
            found = [each for each in tree_leaves(outputs) if isinstance(each, Tensor) and each.is_floating_point()]
            trained = [each for each in found if each.requires_grad]
            torch.autograd.backward(trained, [self.gradient_like(each, mine) for each in trained])
        gradients = {name: each.grad for name, each in copy.named_parameters() if each.grad is not None}
        of_inputs = [each.grad for each in floats.values() if each.grad is not None]
        return Found([each.detach() for each in found], of_inputs, gradients)

    def gradient_like(self, output: Tensor, mine: slice) -> Tensor:
        """Random ones, the same for a token in each run."""
        shape = (output.shape[0], self.few, *output.shape[2:])
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
        return whole[:, mine]


@dataclass(frozen=True)
class Seen:
    """A call of a function of torch's, with its arguments that are neither tensors nor whole numbers.

    Args:
        shapes: of the tensors among its arguments, and of those that it returns.
    """

    function: str
    settings: str
    shapes: tuple[Shapes, Shapes] = field(compare=False, repr=False)


def repeated_blocks(known: Structure, inputs: Any, number: int, few: int) -> dict[str, Callable[..., Any]]:
    """The blocks that call the functions which one before them does, each with a function that hands on what it is
    given instead. A trial of a large model leaves them out."""
    name_of = {module: name for name, module in known.model.named_modules()}
    uses = dict[str, list[BlockUse]]()

    def watched(copy: nn.Module, fake: Any) -> None:
        with Path() as path:
            for block in known.blocks:
                watch(copy.get_submodule(name_of[block]), path, uses.setdefault(name_of[block], []))
            known.call(copy, tree_map_only(Tensor, lambda leaf: first_of(leaf, number, few), fake))

    try:
        with known_values_readable(lambda value: True):
            fake_pass(known.model, watched, inputs)
    except Exception:  # of code that we don't know; `check_way` tells it
        return {}
    kinds, repeated = set[str](), dict[str, Callable[..., Any]]()
    for name, of_block in uses.items():
        shapes = [tuple(each.shape) for each in known.model.get_submodule(name).parameters()]
        kind = f"{type(known.model.get_submodule(name))} {shapes} {[use.calls for use in of_block]}"
        if kind in kinds and (hand_on := handing_on(of_block[0])) is not None:
            repeated[name] = hand_on
        kinds.add(kind)
    return repeated


def first_of(tensor: Tensor, number: int, length: int) -> Tensor:
    return tensor[:, :length] if has_tokens(tensor, number) else tensor


class BlockUse(NamedTuple):
    """A call of a block: the functions that it has called, its arguments as leaves, and what it has returned."""

    calls: list[Seen]
    leaves: Sequence[Any]
    output: Any


def watch(block: nn.Module, path: Path, uses: list[BlockUse]) -> None:
    forward = block.forward

    @wraps(forward)
    def watched(*inputs: Any, **named: Any) -> Any:
        first = len(path.calls)
        output = forward(*inputs, **named)
        uses.append(BlockUse(path.calls[first:], tree_leaves((inputs, named)), output))
        return output

    block.forward = watched


def handing_on(use: BlockUse) -> Callable[..., Any] | None:
    """A forward pass that returns the tensor that it is given, as a block returns one like it; None if it returns
    more, or no such tensor."""
    first, *others = use.output if isinstance(use.output, tuple) else [use.output]
    if not isinstance(first, Tensor) or any(each is not None for each in others):
        return None
    is_like = [
        isinstance(leaf, Tensor) and (leaf.shape, leaf.dtype) == (first.shape, first.dtype) for leaf in use.leaves
    ]
    if not any(is_like):
        return None

    def hand_on(*inputs: Any, **named: Any) -> Any:
        given = tree_leaves((inputs, named))[is_like.index(True)]
        return (given, *others) if isinstance(use.output, tuple) else given

    return hand_on


@final
class Path(TorchFunctionMode):
    """Notes the functions of torch's that are called inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Seen] = []

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs or {}))
        settings = [leaf for leaf in leaves if isinstance(leaf, bool | float | str | torch.dtype) or leaf is None]
        output = func(*args, **(kwargs or {}))
        shapes = shapes_in((args, kwargs)), shapes_in(output)
        self.calls.append(Seen(getattr(func, "__qualname__", repr(func)), repr(settings), shapes))
        return output
