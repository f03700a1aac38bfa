"""Private names of torch's operators: some of ATen's, their schemas, and their kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from lowvram.compat.replaced import replaced

ATEN: Any = torch.ops.aten
C: Any = torch._C
AUTOCAST_ON_CPU = C.DispatchKeySet(C.DispatchKey.AutocastCPU)


class AttentionOps:
    """The operators that scaled_dot_product_attention calls, on all devices.

    torch.ops.aten._scaled_dot_product_…, all of them since 2.5: a dispatch mode sees these, and never the public
    function. Replaced by public names of the kernels, if torch makes some.
    """

    FLASH = ATEN._scaled_dot_product_flash_attention
    EFFICIENT = ATEN._scaled_dot_product_efficient_attention
    CUDNN = ATEN._scaled_dot_product_cudnn_attention
    FLASH_ON_CPU = ATEN._scaled_dot_product_flash_attention_for_cpu
    MATH = ATEN._scaled_dot_product_attention_math  # made of other operators
    FUSED = frozenset({FLASH, EFFICIENT, CUDNN, FLASH_ON_CPU})
    FLASH_BACKWARD = ATEN._scaled_dot_product_flash_attention_backward
    EFFICIENT_BACKWARD = ATEN._scaled_dot_product_efficient_attention_backward
    CUDNN_BACKWARD = ATEN._scaled_dot_product_cudnn_attention_backward
    FLASH_ON_CPU_BACKWARD = ATEN._scaled_dot_product_flash_attention_for_cpu_backward
    FUSED_BACKWARD = frozenset({FLASH_BACKWARD, EFFICIENT_BACKWARD, CUDNN_BACKWARD, FLASH_ON_CPU_BACKWARD})


class CublasOps:
    """The operators whose kernels are cuBLAS's.

    torch.ops.aten._scaled_mm, since 2.1, for products in fp8; the others are public. Replaced by
    torch.nn.functional.scaled_mm, once torchao calls it.
    """

    ALL = frozenset({ATEN.mm, ATEN.addmm, ATEN.bmm, ATEN.baddbmm, ATEN.addbmm, ATEN.mv, ATEN.addmv, ATEN._scaled_mm})


class NormOps:
    """The operators that softmax, log_softmax, attention without a fused kernel and rms_norm call.

    torch.ops.aten._softmax and _log_softmax, since before 1.13, _safe_softmax, since 2.5, and _fused_rms_norm with its
    backward pass, since 2.9: a dispatch mode sees these, and never the public functions. Replaced by public names, if
    torch makes some.
    """

    SOFTMAX = ATEN._softmax
    LOG_SOFTMAX = ATEN._log_softmax
    SOFTMAX_BACKWARD = ATEN._softmax_backward_data
    SAFE_SOFTMAX = ATEN._safe_softmax
    RMS = ATEN._fused_rms_norm
    RMS_BACKWARD = ATEN._fused_rms_norm_backward
    ALL = frozenset(
        {
            SOFTMAX,
            LOG_SOFTMAX,
            SOFTMAX_BACKWARD,
            ATEN._log_softmax_backward_data,
            RMS,
            RMS_BACKWARD,
        }
    )


class ManyOps:
    """Operators on lists of tensors, in few CUDA kernels however many tensors there are.

    torch.ops.aten._foreach_norm, since 1.13: a dispatch mode sees it in gradient clipping. Replaced by a public name,
    if torch makes one.
    """

    NORM = ATEN._foreach_norm


class CopyOps:
    """Operators that `reshape`, `item` and optimizers call, and that copy or fill values, or make a view.

    torch.ops.aten._unsafe_view, _local_scalar_dense, _foreach_zero_, since before 1.13, and _foreach_copy_, since 2.1:
    a dispatch mode sees these, and never the public functions. Replaced by public names, if torch makes some.
    """

    VIEW = ATEN._unsafe_view
    NUMBER = ATEN._local_scalar_dense
    COPY_MANY = ATEN._foreach_copy_
    ZERO_MANY = ATEN._foreach_zero_


def schema_of(operator: Any) -> Any:
    """The declaration of an operator: `name`, `arguments` and `returns`, each with its name, type and what it aliases.

    torch._ops.OpOverload._schema, since before 1.13: publicly there are only names. Replaced by a public property, if
    torch makes one.

    Args:
        operator: an overload, such as torch.ops.aten.add.Tensor.
    """
    return operator._schema


@cache
def written_arguments(operator: Any) -> Sequence[tuple[int, str]]:
    """The arguments that an operator changes in place, each with its place and its name; none of what isn't an
    overload, as higher-order operators aren't.

    torch._ops.OpOverload._schema, since before 1.13. Replaced by a public property, if torch makes one.
    """
    arguments = getattr(getattr(operator, "_schema", None), "arguments", ())
    infos = [(place, each.name, each.alias_info) for place, each in enumerate(arguments)]
    return [(place, name) for place, name, info in infos if info is not None and info.is_write]


def norms(tensors: list[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """The Euclidean norm of each tensor (0-dim, in `dtype`), in few CUDA kernels however many tensors there are.

    torch._foreach_norm, since 1.13, with a format since 2.4: torch documents it without making it public;
    torch.nn.utils.get_total_norm returns only the norm of all together. Replaced by a public name, if torch makes one.
    """
    return torch._foreach_norm(tensors, 2, dtype)  # pyright: ignore[reportPrivateImportUsage]


def multiply_all(tensors: list[Tensor], by: Tensor) -> None:
    """Multiply tensors in place by a 0-dim one on their device, in few CUDA kernels however many tensors there are.

    torch._foreach_mul_, since before 1.13, by a tensor since 2.1: torch documents it without making it public. Replaced
    by a public name, if torch makes one.
    """
    torch._foreach_mul_(tensors, by)  # pyright: ignore[reportPrivateImportUsage]


def move_all(tensors: list[Tensor], towards: list[Tensor], share: float) -> None:
    """Move tensors in place by this share of the way to others of their dtype, in few CUDA kernels, with the numbers of
    torch.optim.swa_utils.get_ema_multi_avg_fn, which calls the same.

    torch._foreach_lerp_, since 2.0: torch documents it without making it public. Replaced by a public name, if torch
    makes one.
    """
    torch._foreach_lerp_(tensors, towards, share)  # pyright: ignore[reportPrivateImportUsage]


def operators_with_kernel(key: str) -> list[str]:
    """The names of all operators of ATen that have a kernel of their own for a dispatch key, such as "AutocastCPU".
    Goes through all operators, which takes a while.

    torch._C._dispatch_get_all_op_names and _dispatch_has_kernel_for_dispatch_key, since 2.0. Replaced by public lists
    of what autocast casts, if torch makes some.
    """
    names = (name for name in C._dispatch_get_all_op_names() if name.startswith("aten::"))
    return [name.removeprefix("aten::") for name in names if C._dispatch_has_kernel_for_dispatch_key(name, key)]


def without_autocast() -> AbstractContextManager[object]:
    """Inside it CPU autocast's kernels are skipped, including those that `Library.impl` has registered in their place,
    so that such a kernel can call the operator below it.

    torch._C._ExcludeDispatchKeyGuard, since 2.1: torch.autocast(enabled=False) still calls autocast's kernels. Replaced
    by a public guard, if torch makes one.
    """
    return C._ExcludeDispatchKeyGuard(AUTOCAST_ON_CPU)


@contextmanager
def on_autocast_end(on_end: Callable[[], None]) -> Iterator[None]:
    """Inside it `on_end` is called whenever the outermost autocast ends and torch drops its casts of weights.

    torch.clear_autocast_cache, since before 1.13, is patched: autocast looks it up in torch when it ends. Replaced by
    a hook, if torch makes one.
    """
    clear_cache = torch.clear_autocast_cache

    def clear() -> None:
        on_end()
        clear_cache()

    with replaced(torch, "clear_autocast_cache", clear):
        yield


def kernels_replaced() -> AbstractContextManager[Library]:
    """A library whose `impl` replaces kernels of ATen's operators until the block ends.

    torch.library._scoped_library, since 2.3: a public Library lasts as long as the process. Replaced by a public way to
    close one, if torch makes it.
    """
    scoped: Any = torch.library._scoped_library
    return scoped("aten", "IMPL")
