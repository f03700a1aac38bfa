"""Adafactor: the second moment of a matrix as the product of a row and a column, so almost no state.

Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost" (2018). The formulas are those of
torch.optim.Adafactor, which holds two more copies of a parameter while it updates it, and has the device wait for two
numbers of each. Ours goes over the rows of a parameter in pieces, and never waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from lowvram.config.errors import require
from lowvram.core.fact import Fact
from lowvram.core.kind import Kind
from lowvram.knobs.optimizer.fp32_compute import (
    STEP,
    RoundingOptimizer,
    RoundingPolicy,
    compute_dtype,
    gradient_of,
    pieces,
)
from lowvram.knobs.optimizer.groups import OptimizerKnob, check_rates, decayed
from lowvram.knobs.optimizer.state_formats import Piece

PIECE_ELEMENTS = 2**21  # of a parameter that are updated at a time: 8 MiB for each copy in fp32
LEAST_SIZE = 1e-3  # of a weight, as a root mean square, to which its step is relative: weights of zero move, too


@dataclass(frozen=True)
class Adafactor(OptimizerKnob):
    """A step changes a weight matrix by at most `lr` times its own size (root mean square)."""

    lr: float = 1e-2
    beta2_decay: float = -0.8
    max_update: float = 1.0
    weight_decay: float = 0.1

    saves = Kind.OPTIMIZER
    needs_always = frozenset({Fact.WHOLE_UPDATES})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rates(self.lr, self.weight_decay)
        require(self.beta2_decay <= 0, "optimizer.beta2_decay", self.beta2_decay, "at most 0")
        require(self.max_update >= 1, "optimizer.max_update", self.max_update, "at least 1")

    def make(self, parameters: list[nn.Parameter], policy: RoundingPolicy | None = None) -> torch.optim.Optimizer:
        groups, policy = decayed(parameters, self.weight_decay), policy or RoundingPolicy()
        return AdafactorOptimizer(groups, policy, lr=self.lr, beta2_decay=self.beta2_decay, max_update=self.max_update)


@final
class AdafactorOptimizer(RoundingOptimizer):
    """The state of a matrix (n, m) has means of squares: "row_var" (n, 1) and "col_var" (1, m). A convolution
    (out, in, k, k) has one such pair for each of its out * in kernels, a bias a "variance" of its own shape."""

    def update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state, parts = self.state[parameter], list(pieces(parameter, PIECE_ELEMENTS))
        if not parts:
            return
        if STEP not in state:
            state |= new_state(parameter)
        state[STEP] += 1
        step = float(state[STEP])
        self.take_in(parameter, parts, step ** group["beta2_decay"])
        size = mean_size(self.widened(self.weight_of(parameter, piece)) for piece in parts).clamp(min=LEAST_SIZE)
        growth = mean_size(self.direction(parameter, piece) for piece in parts) / group["max_update"]
        change = size * min(group["lr"], step**-0.5) / growth.clamp(min=1)
        for piece in parts:
            weight = self.weight_of(parameter, piece)
            wide, move = self.widened(weight), self.direction(parameter, piece).mul_(change)
            wide.mul_(1 - group["lr"] * group["weight_decay"]).sub_(move)
            del move
            self.write(weight, wide)

    def take_in(self, parameter: nn.Parameter, parts: Sequence[Piece], share: float) -> None:
        """Move the means of squares by this share towards those of the gradient."""
        state = self.state[parameter]
        column_squares = torch.zeros_like(state["col_var"]) if parameter.ndim == 2 else None
        for piece in parts:
            gradient = gradient_of(parameter, piece)
            if parameter.ndim < 2:
                piece.of(state["variance"]).lerp_(gradient.square(), share)
                continue
            row_means = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True).square_().div_(gradient.shape[-1])
            piece.of(state["row_var"]).lerp_(row_means, share)
            squares = torch.linalg.vector_norm(gradient, dim=-2, keepdim=True).square_()
            if column_squares is None:
                piece.of(state["col_var"]).lerp_(squares.div_(gradient.shape[-2]), share)
            else:
                column_squares += squares
        if column_squares is not None:
            state["col_var"].lerp_(column_squares.div_(len(parameter)), share)

    def direction(self, parameter: nn.Parameter, piece: Piece) -> Tensor:
        """A piece of the update before its size is limited: the gradient, divided by the root of its second moment."""
        state, gradient = self.state[parameter], gradient_of(parameter, piece)
        eps = torch.finfo(gradient.dtype).eps
        if parameter.ndim < 2:
            second_moment = piece.of(state["variance"]).clone()
        else:
            is_matrix = parameter.ndim == 2  # whose pieces share the column, and the mean of all rows
            row, column = piece.of(state["row_var"]), state["col_var"]
            row_mean = (state["row_var"] if is_matrix else row).mean(dim=-2, keepdim=True).clamp_(min=eps)
            second_moment = (row / row_mean) @ (column if is_matrix else piece.of(column))
        return second_moment.clamp_(min=eps * eps).rsqrt_().mul_(gradient)


def new_state(parameter: nn.Parameter) -> dict[str, Tensor]:
    zeros = partial(torch.zeros, dtype=compute_dtype(parameter), device=parameter.device)
    if parameter.ndim < 2:
        return {STEP: torch.tensor(0.0), "variance": zeros(parameter.shape)}
    *others, rows, columns = parameter.shape
    return {STEP: torch.tensor(0.0), "row_var": zeros(*others, rows, 1), "col_var": zeros(*others, 1, columns)}


def mean_size(parts: Iterable[Tensor]) -> Tensor:
    """The root mean square of a tensor, given piece by piece. In fp64."""
    squares, numel = 0.0, 0
    for part in parts:
        squares, numel = squares + torch.linalg.vector_norm(part).double().square(), numel + part.numel()
    return (torch.as_tensor(squares) / numel).sqrt()
