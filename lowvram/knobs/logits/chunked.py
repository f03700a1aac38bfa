"""The last layer and the loss, some targets at a time.

The gradients of a chunk are formed right after its logits, in the forward pass: three products, as without chunks, not
four as with recomputation. So do Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training" (2024), and
torch's linear_cross_entropy, from 2.13 on, whose chunks are wrong there in bf16 on a CPU.

Shapes: n targets, c targets of a chunk, s some of these, d width of the hidden states, v classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule

from lowvram.compat.torch_autograd import keeps_graph
from lowvram.compat.torch_trees import tree_map_only
from lowvram.config.errors import require
from lowvram.core.knob import Fact, Kind, Knob, Stage
from lowvram.core.rig import IGNORE, Part, Rig
from lowvram.knobs.logits.tied import NUMEL_AT_A_TIME, Handover, Tie

SOFTMAX_ROWS = 128  # whose probabilities exist at a time: they are in fp32
FP16_SCALE = 64.0  # fp16 loses what is below 6e-5: the probability of one class among many thousands


@dataclass(frozen=True)
class FullLogits(Knob):
    """The logits of a part exist whole."""

    stage = Stage.LOGITS

    def apply(self, rig: Rig) -> Rig:
        return rig


@dataclass(frozen=True)
class ChunkedLogits(Knob):
    """The logits of `chunk_tokens` targets at a time: they never exist whole."""

    chunk_tokens: int = 512

    stage = Stage.LOGITS
    band = 2e-6
    saves = Kind.ACTIVATIONS

    def __post_init__(self) -> None:
        require(self.chunk_tokens >= 1, "logits.chunk_tokens", self.chunk_tokens, "at least 1")

    def needs(self) -> frozenset[Fact]:
        return frozenset({Fact.HEAD})

    def breaks(self) -> frozenset[Fact]:
        return frozenset({Fact.FULL_LOGITS})

    def apply(self, rig: Rig) -> Rig:
        head = rig.task.head(rig.model)
        assert head is not None  # Fact.HEAD
        head.forward = lambda input: input  # the model ends with the hidden states, however it is called or compiled
        if isinstance(rig.model, FSDPModule) and len(rig.trainable) < len(list(rig.model.parameters())):
            rig.model.register_forward_hook(torch.compiler.disable(with_gradient), prepend=True)  # pyright: ignore[reportArgumentType]

        tie = Tie(rig.model, head)

        def forward(part: Part) -> UnmadeLogits:
            hidden = rig.forward(part)
            return UnmadeLogits(hidden, head, self.chunk_tokens, tie.handover_for(hidden))

        def criterion(outputs: UnmadeLogits, part: Part) -> Tensor:
            return outputs.cross_entropy(part.targets)

        return replace(rig, forward=forward, criterion=criterion)


def with_gradient(model: nn.Module, inputs: Any, outputs: Any) -> Any:
    """A hook after a sharded model's forward pass. FSDP gathers the head's gradients only if those of the model's
    outputs come by, and hidden states of a frozen model have none."""
    del model, inputs

    def required(tensor: Tensor) -> Tensor:
        is_bare = torch.is_grad_enabled() and tensor.is_floating_point() and not tensor.requires_grad
        return tensor.detach().requires_grad_() if is_bare else tensor

    return tree_map_only(Tensor, required, outputs)


@final
class UnmadeLogits:
    """The outputs of `head` for hidden states (..., d), not computed yet. Products are in the dtype that autocast asks
    for when this object is made."""

    def __init__(self, hidden: Tensor, head: nn.Linear, chunk_tokens: int, handover: Handover | None = None) -> None:
        self.hidden, self.head, self.chunk_tokens, self.handover = hidden, head, chunk_tokens, handover
        self.dtype = dtype_of_products(head.weight)

    def cross_entropy(self, targets: Tensor) -> Tensor:
        """The sum over targets (...), in nats (0-dim, at least fp32); `IGNORE` counts for nothing."""
        weight, bias = self.head.weight, self.head.bias  # now: sharded weights are whole only while the step runs
        fixed = (targets.flatten(), self.chunk_tokens, self.dtype, torch.is_grad_enabled(), self.handover)
        return ChunkedCrossEntropy.apply(self.hidden.flatten(0, -2), weight, bias, *fixed)  # pyright: ignore[reportReturnType]

    @torch.no_grad()
    def argmax(self, dim: int) -> Tensor:
        """The likeliest class of each hidden state (...). `dim` is -1, as a tensor's argmax over classes has it."""
        assert dim == -1
        weight, bias = in_dtype(self.head.weight, self.dtype), in_dtype(self.head.bias, self.dtype)
        chunks = self.hidden.flatten(0, -2).split(self.chunk_tokens)
        classes = [nn.functional.linear(chunk.to(self.dtype), weight, bias).argmax(-1) for chunk in chunks]
        return torch.cat(classes).view(self.hidden.shape[:-1])


def dtype_of_products(weight: Tensor) -> torch.dtype:
    """The dtype in which a layer with this weight multiplies here: autocast's, or its own."""
    device_type = weight.device.type
    is_cast = torch.is_autocast_enabled(device_type) and weight.dtype is not torch.float64
    return torch.get_autocast_dtype(device_type) if is_cast else weight.dtype


def in_dtype(tensor: Tensor | None, dtype: torch.dtype) -> Any:
    return None if tensor is None else tensor.to(dtype)


@final
class ChunkedCrossEntropy(torch.autograd.Function):
    """The sum of the cross-entropies of a linear layer's outputs, made and forgotten chunk by chunk.

    It rounds where the plain way does: products in `dtype`, probabilities in fp32 at least. Sums over chunks are in
    fp32 at least.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_nd: Tensor,
        weight_vd: Tensor,
        bias_v: Tensor | None,
        targets_n: Tensor,
        chunk_tokens: int,
        dtype: torch.dtype,
        has_backward: bool,
        handover: Handover | None,
    ) -> Tensor:
        wanted = [has_backward and needed for needed in ctx.needs_input_grad[:3]]
        chunks = Chunks(hidden_nd, weight_vd, bias_v, min(chunk_tokens, len(hidden_nd)), dtype, wanted)
        loss = hidden_nd.new_zeros((), dtype=chunks.exact)
        for first in range(0, len(hidden_nd), chunk_tokens):
            loss += chunks.loss(slice(first, first + chunk_tokens), targets_n)
        gradients, ctx.factors = chunks.gradients()
        ctx.save_for_backward(*gradients)
        ctx.dtypes, ctx.handover = [hidden_nd.dtype, weight_vd.dtype, weight_vd.dtype], handover
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The saved gradients times that of the loss; in place, unless the graph is walked again."""
        is_last = not keeps_graph()
        saved = zip(ctx.saved_tensors, ctx.factors, ctx.dtypes, strict=True)
        gradients = [scaled(gradient, loss_gradient * factor, is_last, dtype) for gradient, factor, dtype in saved]
        if ctx.handover is not None:
            gradients[1] = ctx.handover.leave(gradients[1])
        return (*gradients, None, None, None, None, None)


def scaled(gradient: Tensor | None, factor: Tensor, may_overwrite: bool, dtype: torch.dtype) -> Tensor | None:
    """`gradient` * `factor`, rounded to `dtype` once. Where that takes more digits than the gradient has, it is done a
    few rows at a time."""
    if gradient is None:
        return None
    if gradient.dtype is factor.dtype:
        return (gradient.mul_(factor) if may_overwrite else gradient * factor).to(dtype)
    out = gradient if may_overwrite and gradient.dtype is dtype else torch.empty_like(gradient, dtype=dtype)
    num_rows = max(1, NUMEL_AT_A_TIME // max(1, gradient[:1].numel()))
    for rows, out_rows in zip(gradient.split(num_rows), out.split(num_rows), strict=True):
        out_rows.copy_(rows.to(factor.dtype).mul_(factor))
    return out


@final
class Chunks:
    """The memory of one chunk, and gradients that grow from chunk to chunk."""

    def __init__(
        self,
        hidden_nd: Tensor,
        weight_vd: Tensor,
        bias_v: Tensor | None,
        size: int,
        dtype: torch.dtype,
        wanted: list[bool],
    ) -> None:
        self.exact = torch.promote_types(dtype, torch.float32)
        self.hidden_nd, self.dtype, self.has_backward = hidden_nd, dtype, any(wanted)
        self.weight_vd, self.bias_v = in_dtype(weight_vd, dtype), in_dtype(bias_v, dtype)
        num_classes = len(weight_vd)
        self.logits_cv = weight_vd.new_empty(size, num_classes, dtype=dtype)
        self.log_p_sv = weight_vd.new_empty(min(size, SOFTMAX_ROWS), num_classes, dtype=self.exact)
        sum_dtype = dtype if size == len(hidden_nd) else self.exact  # one chunk: there is nothing to sum
        self.hidden_gradient_nd = weight_vd.new_empty(hidden_nd.shape, dtype=dtype) if wanted[0] else None
        self.weight_gradient_vd = weight_vd.new_zeros(weight_vd.shape, dtype=sum_dtype) if wanted[1] else None
        # Kept from chunk to chunk: to a CPU, touching new memory costs as much as the product that goes there.
        is_apart = wanted[1] and sum_dtype is not dtype
        self.product_vd = weight_vd.new_empty(weight_vd.shape, dtype=dtype) if is_apart else None
        self.bias_gradient_v = weight_vd.new_zeros(num_classes, dtype=self.exact) if wanted[2] else None
        # fp16: probabilities as with a loss scale, and the mean over a chunk instead of its sum. Powers of two: exact.
        is_narrow = dtype is torch.float16
        self.logit_scale, self.hidden_scale = (FP16_SCALE, 0.5 ** size.bit_length()) if is_narrow else (1.0, 1.0)

    def gradients(self) -> tuple[list[Tensor | None], list[float]]:
        """The gradients of hidden states, weight and bias, and the factors by which they must still be multiplied."""
        gradients = [self.hidden_gradient_nd, self.weight_gradient_vd, self.bias_gradient_v]
        return gradients, [1 / self.logit_scale, 1 / self.logit_scale / self.hidden_scale, 1.0]

    def loss(self, rows: slice, targets_n: Tensor) -> Tensor:
        """The sum over some rows (0-dim); adds their gradients to the others."""
        targets_c1 = targets_n[rows, None]
        counts_c1 = targets_c1 != IGNORE
        targets_c1 = targets_c1.where(counts_c1, 0)
        hidden_cd = self.hidden_nd[rows].where(counts_c1, 0).to(self.dtype)
        logits_cv = self.logits_cv[: len(hidden_cd)]
        if self.bias_v is None:
            torch.mm(hidden_cd, self.weight_vd.T, out=logits_cv)
        else:
            torch.addmm(self.bias_v, hidden_cd, self.weight_vd.T, out=logits_cv)
        parts = zip(*(each.split(SOFTMAX_ROWS) for each in (logits_cv, targets_c1, counts_c1)), strict=True)
        loss = torch.stack([self._softmax(*part) for part in parts]).sum()
        if self.has_backward:
            self._add_gradients(rows, hidden_cd, logits_cv, counts_c1)
        return loss

    def _softmax(self, logits_sv: Tensor, targets_s1: Tensor, counts_s1: Tensor) -> Tensor:
        """The sum over some rows of a chunk. Of their logits it leaves the gradient: p - 1 at the target, else p."""
        log_p_sv = self.log_p_sv[: len(logits_sv)]
        torch.log_softmax(logits_sv, -1, dtype=self.exact, out=log_p_sv)
        loss = -log_p_sv.gather(1, targets_s1).where(counts_s1, 0).sum()
        if self.has_backward:
            gradient_sv = log_p_sv.exp_()
            gradient_sv.scatter_(1, targets_s1, gradient_sv.gather(1, targets_s1) - 1)
            if self.bias_gradient_v is not None:
                self.bias_gradient_v.addmv_(gradient_sv.T, counts_s1[:, 0].to(self.exact))
            logits_sv.copy_(gradient_sv.mul_(self.logit_scale) if self.logit_scale != 1.0 else gradient_sv)
        return loss

    def _add_gradients(self, rows: slice, hidden_cd: Tensor, gradient_cv: Tensor, counts_c1: Tensor) -> None:
        """Add to the gradients, given that of the logits. Rows that don't count have zero hidden states, so they add
        nothing to the weight's."""
        if self.hidden_gradient_nd is not None:
            torch.mm(gradient_cv, self.weight_vd, out=self.hidden_gradient_nd[rows]).mul_(counts_c1)
        if self.weight_gradient_vd is not None:
            hidden_cd = hidden_cd.mul_(self.hidden_scale)
            if self.product_vd is None:
                self.weight_gradient_vd.addmm_(gradient_cv.T, hidden_cd)
            else:
                self.weight_gradient_vd.add_(torch.mm(gradient_cv.T, hidden_cd, out=self.product_vd))
