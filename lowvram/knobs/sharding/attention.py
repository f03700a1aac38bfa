"""Attention where each rank of a row has a run of each sample's tokens: inside it, each has all tokens of some heads.

Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer
Models" (2023).

Shapes: b samples, t tokens of a sample, s of a rank's run, n heads, h of a rank, c width of one head, r ranks of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lowvram.config.errors import Incompatible, require
from lowvram.core.attention import Kernel, as_autocast, replacing_attention
from lowvram.core.mesh import Ranks
from lowvram.core.slices import begin_of
from lowvram.knobs.sharding.released import released

KEY = "sharding.context"


class Row(Protocol):
    """A row of ranks, as one of them sees it. Each must call `exchange` when the others do."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def exchange(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """What the ranks send to this one, one rank after another.

        Args:
            x: (sum(sends), ...), without gaps: what this rank sends, to one rank after another.
            sends, receives: how much of the first dimension each rank is sent, and sends.
        """
        ...


@final
class ProcessRow(Row):
    """Ranks that are processes."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    @property
    def rank(self) -> int:
        return self._ranks.rank

    @property
    def size(self) -> int:
        return self._ranks.size

    def exchange(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        received = x.new_empty((sum(receives), *x.shape[1:]))
        with released(received, x):
            dist.all_to_all_single(received, x, list(receives), list(sends), group=self._ranks.group)
        return received


class Exchanged(torch.autograd.Function):
    """`Row.exchange`, whose gradients go back to where they come from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, row: Row, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        ctx.row, ctx.sends, ctx.receives = row, sends, receives
        return row.exchange(x, sends, receives)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.row.exchange(gradients[0].contiguous(), ctx.receives, ctx.sends), None, None, None


@final
class Runs:
    """The runs of tokens of a row's ranks: in order, as many to each as possible.

    Attributes:
        num_tokens: t of the part that is computed; 0: a rank has all of them.
    """

    def __init__(self, row: Row) -> None:
        self.row, self.num_tokens = row, 0

    def begin(self, rank: int) -> int:
        return begin_of(self.num_tokens, rank, self.row.size)

    @property
    def mine(self) -> slice:
        return slice(self.begin(self.row.rank), self.begin(self.row.rank + 1))

    @property
    def sizes(self) -> list[int]:
        return [self.begin(rank + 1) - self.begin(rank) for rank in range(self.row.size)]


_of_process: list[Runs] = []  # the one whose attention is that of all runs, in all threads: autograd has its own
_of_thread = ContextVar[Runs | None]("runs", default=None)  # the same in a trial, whose ranks are threads


@contextmanager
def attending(model: nn.Module, runs: Runs) -> Iterator[None]:
    """Around forward passes of a model, and backward passes that compute some of them again: attention between the
    tokens of a run is attention between those of all runs."""
    if _of_process:
        yield
        return
    _of_process.append(runs)
    try:
        with replacing_attention(model, attention):
            yield
    finally:
        _of_process.clear()


@contextmanager
def attending_in_thread(runs: Runs) -> Iterator[None]:
    """The same for this thread alone; inside `replacing_attention`."""
    token = _of_thread.set(runs)
    try:
        yield
    finally:
        _of_thread.reset(token)


def attention(kernel: Kernel, *args: Any, **named: Any) -> Any:
    """As F.scaled_dot_product_attention; where a rank has a run of tokens, between those of all runs."""
    runs = _of_thread.get() or next(iter(_of_process), None)
    return kernel(*args, **named) if runs is None or not runs.num_tokens else attend(kernel, runs, *args, **named)


def attend(
    kernel: Kernel,
    runs: Runs,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    *args: Any,
    **named: Any,
) -> Any:
    """As `kernel`, torch's attention. What isn't between the tokens of a run is left as it is.

    Raises:
        BadInput: the number of ranks doesn't divide the heads.
        Incompatible: there is a mask.
    """
    own = runs.sizes[runs.row.rank]
    if any(x.dim() != 4 or x.shape[2] != own for x in (query, key, value)):
        return kernel(query, key, value, attn_mask, *args, **named)
    if attn_mask is not None:
        raise Incompatible(
            f"{KEY}: this model gives attention a mask (for padding, packed rows, a window), of which a rank has that"
            " of its own tokens alone: choose data without padding, loader=bucketed, or sharding=tensor"
        )
    check_heads(query.shape[1], key.shape[1], runs.row.size)
    q, k, v = (to_heads(as_autocast(x), runs) for x in (query, key, value))
    return to_runs(kernel(q, k, v, None, *args, **named), runs)


def check_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> None:
    """Raises BadInput where ranks can't have whole heads, each with the keys and values that it reads."""

    def fits(number: int) -> bool:
        return num_heads % number == 0 and (num_kv_heads % number == 0 or number % num_kv_heads == 0)

    fitting = ", ".join(str(number) for number in range(1, num_heads + 1) if fits(number))
    of_keys = "" if num_kv_heads == num_heads else f", and those of its {num_kv_heads} heads of keys and values"
    allowed = f"a number that divides the model's {num_heads} heads{of_keys}: one of {fitting}"
    require(fits(num_ranks), KEY, num_ranks, allowed)


def to_heads(x_bnsc: Tensor, runs: Runs) -> Tensor:
    """All heads of a run to all tokens of some heads, (b, h, t, c). Of fewer heads than ranks each is sent to several.
    What arrives stays as it lies: tokens first."""
    num_ranks = runs.row.size
    if x_bnsc.shape[1] % num_ranks:
        x_bnsc = x_bnsc.repeat_interleave(num_ranks // x_bnsc.shape[1], 1)
    x_rsbhc = x_bnsc.unflatten(1, (num_ranks, -1)).permute(1, 3, 0, 2, 4)
    sends = [x_bnsc.shape[2]] * num_ranks
    x_tbhc: Any = Exchanged.apply(x_rsbhc.reshape(-1, *x_rsbhc.shape[2:]).contiguous(), runs.row, sends, runs.sizes)
    return x_tbhc.permute(1, 2, 0, 3)


def to_runs(x_bhtc: Tensor, runs: Runs) -> Tensor:
    """The way back: (b, n, s, c), which lies as (b, s, n, c), since models put a token's heads side by side next."""
    x_tbhc = x_bhtc.permute(2, 0, 1, 3).contiguous()
    receives = [runs.sizes[runs.row.rank]] * runs.row.size
    x: Any = Exchanged.apply(x_tbhc, runs.row, runs.sizes, receives)
    x_bsrhc = x.unflatten(0, (runs.row.size, -1)).permute(2, 1, 0, 3, 4)
    return x_bsrhc.flatten(2, 3).transpose(1, 2)
