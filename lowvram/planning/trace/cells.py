"""torch.nn.GRUCell and LSTMCell as on a card, for fake CPU tensors: one kernel computes all gates, and keeps them for
the backward pass. (On a CPU torch builds a cell from many operators.)

After PyTorch's aten/src/ATen/native/RNN.cpp and cuda/RNN.cu (_thnn_fused_gru_cell, _thnn_fused_lstm_cell) and their
formulas in tools/autograd/derivatives.yaml, torch 2.13.

Shapes: b samples, c features of a state, g all gates side by side (3 c in a GRU, 4 c in an LSTM).
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

ATEN = torch.ops.aten


def gru_cell(
    input: Tensor,
    state_bc: Tensor,
    input_weight: Tensor,
    state_weight: Tensor,
    input_bias: Tensor | None = None,
    state_bias: Tensor | None = None,
) -> Tensor:
    from_input, from_state = (
        ATEN.matmul.default(x, weight.t()) for x, weight in ((input, input_weight), (state_bc, state_weight))
    )
    return Gates.apply(from_input, from_state, state_bc, input_bias, state_bias, 5, 1)  # pyright: ignore[reportReturnType]


def lstm_cell(
    input: Tensor,
    states_bc: list[Tensor],
    input_weight: Tensor,
    state_weight: Tensor,
    input_bias: Tensor | None = None,
    state_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    state_bc, memory_bc = states_bc
    from_input, from_state = (
        ATEN.matmul.default(x, weight.t()) for x, weight in ((input, input_weight), (state_bc, state_weight))
    )
    return Gates.apply(from_input, from_state, memory_bc, input_bias, state_bias, 4, 2)  # pyright: ignore[reportReturnType]


@final
class Gates(torch.autograd.Function):
    """The memory of a cell's kernel, forward and backward; it computes nothing."""

    @staticmethod
    def forward(
        ctx: Any,
        from_input_bg: Tensor,
        from_state_bg: Tensor,
        state_bc: Tensor,
        input_bias: Tensor | None,
        state_bias: Tensor | None,
        num_kept: int,
        num_states: int,
    ) -> Any:
        """Returns `num_states` new states. Keeps a tensor (b, num_kept · c) for the backward pass."""
        states = tuple(torch.empty_like(state_bc) for _ in range(num_states))
        gates = state_bc.new_empty(len(state_bc), num_kept * state_bc.shape[-1])
        ctx.save_for_backward(from_input_bg, from_state_bg, state_bc, input_bias, state_bias, gates)
        return states[0] if num_states == 1 else states

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        from_input_bg, from_state_bg, state_bc, input_bias, state_bias, _ = ctx.saved_tensors
        gradients = [torch.empty_like(tensor) for tensor in (from_input_bg, from_state_bg, state_bc)]
        biases = zip(gradients, (input_bias, state_bias), strict=False)
        return (*gradients, *(None if bias is None else each.sum(0) for each, bias in biases), None, None)
