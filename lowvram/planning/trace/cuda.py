"""Makes torch treat fake CPU tensors as it treats tensors on a CUDA card.

Where PyTorch treats CUDA tensors differently, `acts_as_card` registers the CUDA behaviour for the CPU: autocast's
lists, the choice of attention kernel (attention.py), RMS norms (rms_norm.py), dropout's mask, softmax of 16-bit
numbers, streams. That changes
the whole process until the context ends, so use it only in a process that plans and computes nothing. The sources are
PyTorch's native/{Dropout,Linear,SoftMax}.cpp.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor

from lowvram.compat.replaced import replaced
from lowvram.compat.torch_distributed import gathered_from
from lowvram.compat.torch_ops import NormOps, kernels_replaced
from lowvram.compat.torch_optim import foreach_chosen_by
from lowvram.core import attention as core_attention
from lowvram.core import host
from lowvram.core.device import Card
from lowvram.core.shards import local
from lowvram.models import attention as own_attention
from lowvram.planning.trace.attention import attention, takes_flash
from lowvram.planning.trace.autocast import register_autocast, weights_cast_once
from lowvram.planning.trace.cells import gru_cell, lstm_cell
from lowvram.planning.trace.rms_norm import rms_norm, rms_norm_backward
from lowvram.planning.trace.streams import Streams

ATEN = torch.ops.aten


@contextmanager
def acts_as_card(card: Card, streams: Streams | None = None) -> Iterator[None]:
    """Inside it CPU tensors are treated as tensors on `card`, with its `streams`."""
    with kernels_replaced() as library, warnings.catch_warnings(), ExitStack() as undo:
        undo.enter_context(replaced(own_attention, "is_on_cpu", lambda tensor: False))
        undo.enter_context(replaced(core_attention, "takes_flash", partial(takes_flash, card)))
        undo.enter_context(replaced(host, "copies_overlap", lambda device: True))
        undo.enter_context(replaced(host, "moved", lambda tensor, device: tensor.clone()))
        undo.enter_context(replaced(host, "arrived", lambda tensor: host.mark(tensor.clone())))
        undo.enter_context((streams or Streams()).replacing_torchs())
        undo.enter_context(weights_cast_once())
        undo.enter_context(gathered_from(on_card))
        undo.enter_context(foreach_chosen_by(lambda parameter: not host.holds(local(parameter))))
        warnings.simplefilter("ignore")  # torch warns of each kernel that is replaced
        register_autocast(library)
        replace = {
            "scaled_dot_product_attention": partial(attention, card),
            "linear": linear,
            "gru_cell": gru_cell,
            "lstm_cell": lstm_cell,
            "dropout": dropout,
            "softmax.int": partial(softmax, NormOps.SOFTMAX.default),
            "log_softmax.int": partial(softmax, NormOps.LOG_SOFTMAX.default),
        }
        for name, kernel in replace.items():
            library.impl(name, kernel, "AutogradCPU")
        for operator, kernel in ((NormOps.RMS, rms_norm), (NormOps.RMS_BACKWARD, rms_norm_backward)):
            library.impl(operator.default, kernel, "CPU")
        yield


def on_card(weight: Tensor) -> Tensor:
    """A copy of a weight that is kept on the host, as it arrives on the card."""
    return weight.clone() if host.holds(weight) else weight


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch's linear (native/Linear.cpp) as on real tensors. For subclasses, as fake tensors are, torch's own doesn't
    add the bias in place."""
    if bias is None:
        return ATEN.matmul.default(input, weight.t())
    if input.dim() == 2:
        return ATEN.addmm.default(bias, input, weight.t())
    if input.dim() == 3 and input.is_contiguous():
        flat = ATEN.addmm.default(bias, input.reshape(-1, input.shape[-1]), weight.t())
        return flat.view(*input.shape[:-1], flat.shape[-1])
    return ATEN.matmul.default(input, weight.t()).add_(bias)


def softmax(operator: Callable[..., Tensor], input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax or log_softmax in `dtype`. From fp16 the kernel writes fp32 directly; bf16 is first copied to fp32, as in
    torch 2.13 (SoftMax.cpp)."""
    if input.dtype is torch.float16 and dtype is torch.float32:
        return operator(input, dim, True)
    return operator(input if dtype is None else input.to(dtype), dim, False)


def dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """On a card dropout keeps a mask of one byte per element, on a CPU one in the input's format."""
    if not train or p == 0 or input.numel() == 0:
        return input
    return ATEN.native_dropout.default(input, p, train)[0] if p < 1 else input * 0
