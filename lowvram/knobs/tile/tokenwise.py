"""Modules, or methods, that compute each token from that token alone: found, and computed in chunks of tokens.

One forward pass on fake tensors shows with what shapes each is called. Then each runs on a few tokens, some of them
NaN, with all its weights zero: NaN spreads to every output that depends on it, whatever the weights. What NaN doesn't
pass through, alone.py sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import Signature, signature
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from lowvram.compat.torch_modes import without_dispatch_modes
from lowvram.compat.torch_modules import BatchNorm
from lowvram.compat.torch_trees import tree_flatten
from lowvram.core.generators import same_draws_afterwards
from lowvram.core.probes.alone import Call, is_same_alone, with_zeros
from lowvram.core.probes.fake_pass import fake_pass
from lowvram.core.repeat import Repeatable
from lowvram.core.structure import Probe, Structure
from lowvram.knobs.tile.chunks import Chunks, Inner, in_chunks

FEW = 4  # tokens that the check computes

Place = tuple[str, str]  # the dotted name of a module, and the name of its method


def tokenwise(places: Sequence[Place], known: Structure) -> tuple[Place, ...]:
    """Those of the places that map tensors (samples, tokens, ..., width) to one such tensor, each token by itself."""
    uses = uses_of(places, known) if places else {}
    verdicts: dict[str, bool] = {}  # blocks are alike: each kind is checked once
    found: list[Place] = []
    for (owner, method), use in uses.items():
        module = known.model.get_submodule(owner)
        kind = f"{type(module)} {module} {method} {[(each.shape, each.dtype) for each in use.like]}"
        if kind not in verdicts:
            verdicts[kind] = (
                use.is_plain
                and keeps_tokens_apart(module, method, use.like)
                and is_same_alone(module, call_of(method, use.like))
            )
        if verdicts[kind]:
            found.append((owner, method))
    return tuple(found)


@final
@dataclass(frozen=True)
class OutsideBlocks(Probe[tuple[Place, ...]]):
    """The layers with weights that stand outside of the blocks and compute each token from that token alone, as the
    last norm does; without the head, whose logits are another option's."""

    def find(self, known: Structure) -> tuple[Place, ...]:
        inside = {module for block in known.blocks for module in block.modules()}
        layers = [
            (name, module)
            for name, module in known.model.named_modules()
            if module not in inside and module is not known.head and not [*module.children()]
        ]
        return tokenwise([(name, "forward") for name, layer in layers if [*layer.parameters()]], known)


def tile(model: nn.Module, places: Sequence[Place], tokens: int, of_each_sample: bool = False) -> None:
    """Have modules compute so many tokens at a time.

    Args:
        of_each_sample: not of all samples together.
    """
    for name, method in places:
        owner = model.get_submodule(name)
        setattr(owner, method, Tiled(Inner(Repeatable(owner), getattr(owner, method)), tokens, of_each_sample))


def token_dim(states: Tensor) -> int:
    """The dimension along which tokens are cut: of hidden states (samples, tokens, ..., width) the second one, of
    (tokens, width) the first."""
    return 1 if states.dim() > 2 else 0


class Use(NamedTuple):
    """How a method was called."""

    is_plain: bool  # with tensors of the same shape but for the width, and so is what it returned
    like: tuple[Tensor, ...]  # its inputs


def uses_of(places: Sequence[Place], known: Structure) -> dict[Place, Use]:
    """How one forward pass of the model calls methods, in the order in which they first return; none if it can't run on
    fake tensors."""
    uses: dict[Place, Use] = {}

    def watched(copy: nn.Module, fake: Any) -> None:
        for place in places:
            watch(copy, place, uses)
        known.call(copy, fake)

    try:
        fake_pass(known.model, watched, known.example(2), guesses=False)
    except Exception:
        return {}
    return uses


def watch(model: nn.Module, place: Place, uses: dict[Place, Use]) -> None:
    owner, method = model.get_submodule(place[0]), getattr(model.get_submodule(place[0]), place[1])

    @wraps(method)  # transformers counts the parameters of `feed_forward_chunk`
    def watched(*inputs: Any, **named: Any) -> Any:
        output = method(*inputs, **named)
        tensors = [*inputs, output]
        is_plain = not named and all(isinstance(each, Tensor) and each.dim() > 1 for each in tensors)
        is_plain = is_plain and len({each.shape[:-1] for each in tensors}) == 1
        before = uses.get(place, Use(True, ()))
        uses[place] = Use(before.is_plain and is_plain, inputs if is_plain else ())
        return output

    setattr(owner, place[1], watched)


def call_of(method: str, inputs: tuple[Tensor, ...]) -> Call:
    return Call(method, *tree_flatten((inputs, {})), [True] * len(inputs), token_dim(inputs[0]))


def keeps_tokens_apart(module: nn.Module, method: str, like: Sequence[Tensor]) -> bool:
    """Whether each output token depends on the same token of the inputs alone.

    Args:
        like: tensors of any device and size with the inputs' number of dimensions, their formats and widths.
    """
    if any(isinstance(each, BatchNorm) for each in module.modules()):
        return False
    try:
        with without_dispatch_modes(), same_draws_afterwards(module), torch.no_grad(), torch.device("cpu"):
            call = getattr(with_zeros(module), method)
            return all(spreads_only_to(call, like, places) for places in (slice(0, 1), slice(1, FEW)))
    except Exception:
        return False


def spreads_only_to(call: Callable[..., Tensor], like: Sequence[Tensor], places: slice) -> bool:
    """Whether NaN in the tokens at `places` makes their outputs NaN, and no others."""
    output = call(*(with_nan(each, places) for each in like)).movedim(token_dim(like[0]), 0).flatten(1)
    is_nan = output.isnan().all(1)
    wanted = torch.zeros(FEW, dtype=torch.bool)
    wanted[places] = True
    return torch.equal(is_nan, wanted) and not output[~wanted].isnan().any()


def with_nan(like: Tensor, places: slice) -> Tensor:
    dim = token_dim(like)
    shape = list(like.shape)
    shape[dim] = FEW
    filled = torch.zeros(shape, dtype=like.dtype)
    if filled.is_floating_point():
        filled.movedim(dim, 0)[places] = torch.nan
    return filled


@final
@dataclass(frozen=True, eq=False)
class Tiled:
    """A method that computes its tokens in chunks. With at most `tokens` tokens it is as it was."""

    inner: Inner
    tokens: int
    of_each_sample: bool = False

    @property
    def __signature__(self) -> Signature:
        """That of the method: transformers counts the parameters of a BERT's `feed_forward_chunk`."""
        return signature(self.inner.call)

    def __call__(self, *inputs: Tensor) -> Tensor:
        dim = token_dim(inputs[0])
        length = inputs[0].shape[dim]
        num_tokens = length if self.of_each_sample else inputs[0][..., 0].numel()
        if num_tokens <= self.tokens:
            return self.inner.call(*inputs)
        chunks = Chunks(dim, max(1, self.tokens * length // num_tokens))
        return in_chunks(self.inner, chunks, inputs)
