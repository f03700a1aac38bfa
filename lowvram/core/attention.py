"""What stands in the place of torch's scaled_dot_product_attention."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from lowvram.compat.replaced import replaced
from lowvram.compat.torch_ops import AttentionOps

Kernel = Callable[..., Tensor]
TORCHS: Kernel = F.scaled_dot_product_attention
FLASH_MULTIPLE = 8  # of the width of a head


@contextmanager
def replacing_attention(model: nn.Module, attention: Callable[..., Any]) -> Iterator[None]:
    """Inside it `attention` stands in the place of torch's, by the name that torch gives it, and by those that the
    model's code does. A torch function mode would be off inside `backward`.

    Args:
        attention: is given what it replaces, and the arguments of the call.
    """
    files = {F, *(sys.modules.get(type(module).__module__, F) for module in model.modules())}
    kernel = F.scaled_dot_product_attention  # perhaps what others have put there
    names = [
        (file, name) for file in files for name, value in list(vars(file).items()) if value is TORCHS or value is kernel
    ]
    with ExitStack() as undo:
        for file, name in names:
            undo.enter_context(replaced(file, name, partial(attention, kernel)))
        yield


def attention_of_last(
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Causal attention where the queries are those of the last tokens: (b, n, s, c) read keys (b, m, t, c) and values
    (b, m, t, c) of tokens that aren't later.

    On cards flash attention computes that, as torch.nn.attention.bias.causal_lower_right has it; other kernels need a
    mask.

    Args:
        kernel: torch's attention, or what stands in its place.
    """
    if takes_flash(query, key, value, dropout_p, enable_gqa):
        width = query.shape[-1]
        missing = -width % FLASH_MULTIPLE
        padded = [torch.constant_pad_nd(x, (0, missing)) if missing else x for x in (query, key, value)]
        scale = width**-0.5 if scale is None else scale
        return AttentionOps.FLASH.default(*padded, dropout_p, True, scale=scale)[0][..., :width]
    num_queries, num_keys = query.shape[-2], key.shape[-2]
    pairs = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
    mask = pairs.tril(num_keys - num_queries)
    return kernel(query, key, value, mask, dropout_p, False, scale=scale, enable_gqa=enable_gqa)


def takes_flash(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_grouped: bool) -> bool:
    """Whether torch would run flash attention without a mask. A plan for a card replaces this function."""
    if not query.is_cuda or query.shape[-1] != value.shape[-1]:
        return False
    return can_use_flash_attention(SDPAParams(query, key, value, None, dropout_p, False, is_grouped))


def as_autocast(x: Tensor) -> Tensor:
    """In the number format in which autocast computes attention and layers, before it is sent, or kept."""
    is_cast = torch.is_autocast_enabled(x.device.type) and x.is_floating_point() and x.dtype is not torch.float64
    return x.to(torch.get_autocast_dtype(x.device.type)) if is_cast else x
