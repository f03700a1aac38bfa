"""CUDA's autocast for CPU tensors: its lists of operators, and kernels that cast as they say (ATen/autocast_mode.h)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, fallthrough_kernel

from lowvram.compat.torch_ops import on_autocast_end, operators_with_kernel, schema_of, without_autocast
from lowvram.compat.torch_trees import tree_leaves, tree_map


def words(text: str) -> list[str]:
    return text.split()


ATEN = torch.ops.aten

# Autocast's lists for CUDA, of torch 2.13; an older torch may cast fewer of them (see `cast_by_cuda`). First the
# operators that are cast to autocast's format on a CPU, too, ...
LOWER_ON_BOTH = words("""_convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
conv_transpose3d.input addmm matmul mm linalg_vecdot linear addbmm baddbmm bmm scaled_dot_product_attention""")
# ... and only on CUDA.
LOWER = words("""_convolution convolution prelu addmv addr einsum mv chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
_thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention""")
FP32 = words("""acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm
nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss
kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
upsample_bicubic2d _upsample_bicubic2d_aa""")
FP32_OUT = words("""prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList""")
FP32_NORM = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
WIDEST = words("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")


def register_autocast(library: Library) -> None:
    """Register kernels that cast as on a card. Operators that only the CPU's autocast would cast run without a cast."""
    policies = [(LOWER, lower), (FP32, fp32), (FP32_OUT, fp32_out), (WIDEST, widest)]
    named = [(name, policy) for names, policy in policies for name in names if name in cast_by_cuda()]
    kernels = {name: partial(policy, overload(name)) for name, policy in named}
    kernels |= {name: partial(fp32_out, overload(other)) for name, other in FP32_NORM.items()}
    for name in cast_by_cpu():
        if name not in LOWER_ON_BOTH and name not in kernels:
            library.impl(name, fallthrough_kernel, "AutocastCPU")
    for name, kernel in kernels.items():
        library.impl(name, kernel, "AutocastCPU")


@cache
def cast_by_cpu() -> list[str]:
    """The operators that the CPU's own autocast casts. Must first be called before anything is registered."""
    return operators_with_kernel("AutocastCPU")


@cache
def cast_by_cuda() -> frozenset[str]:
    """The operators that CUDA's autocast casts in the installed torch: rms_norm, for example, isn't cast in 2.11."""
    return frozenset(operators_with_kernel("AutocastCUDA"))


def overload(name: str) -> Callable[..., Any]:
    """ATen's operator of a name such as "pow.Scalar"."""
    packet, _, which = name.partition(".")
    return getattr(getattr(ATEN, packet), which or "default")


def is_cast(value: Any) -> bool:
    """Whether autocast casts this argument: a floating-point CPU tensor, but not fp64."""
    is_number = isinstance(value, Tensor) and value.is_floating_point()
    return is_number and value.dtype is not torch.float64 and value.device.type == "cpu"


def called(operator: Callable[..., Any], dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    """Call an operator with its tensors cast to `dtype`, without further casts inside."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if is_cast(value) else value

    with without_autocast():
        return operator(*tree_map(cast, args), **tree_map(cast, kwargs))


_cast_weights: dict[int, tuple[Tensor, Tensor]] = {}  # weights by id, and their casts


@contextmanager
def weights_cast_once() -> Iterator[None]:
    """Inside it the kernels registered here cast each weight once within the outermost autocast, as torch's own kernels
    do. They need a cache of their own, as only torch's can use torch's."""
    with on_autocast_end(_cast_weights.clear):
        yield
    _cast_weights.clear()


def cast_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    if id(weight) not in _cast_weights:
        _cast_weights[id(weight)] = weight, weight.to(dtype)
    return _cast_weights[id(weight)][1]


def lower(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Cast to autocast's format, and weights only once."""
    dtype = torch.get_autocast_dtype("cpu")

    def cast(value: Any) -> Any:
        is_weight = is_cast(value) and value.dtype is torch.float32 and value.is_leaf and value.requires_grad
        return cast_weight(value, dtype) if is_weight and torch.is_autocast_cache_enabled() else value

    return called(operator, dtype, tree_map(cast, args), tree_map(cast, kwargs))


def fp32(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return called(operator, torch.float32, args, kwargs)


def fp32_out(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Pass dtype=fp32 to the operator, which casts itself, unless the caller passes a dtype."""
    named_args = dict(zip([argument.name for argument in schema_of(operator).arguments], args, strict=False)) | kwargs
    if is_cast(args[0]) and named_args.get("dtype") is None:
        named_args["dtype"] = torch.float32
    with without_autocast():
        return operator(**named_args)


def widest(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Cast to the widest format of the inputs, at least autocast's."""
    dtype = torch.get_autocast_dtype("cpu")
    for value in tree_leaves((args, kwargs)):
        if is_cast(value):
            dtype = torch.promote_types(dtype, value.dtype)
    return called(operator, dtype, args, kwargs)
