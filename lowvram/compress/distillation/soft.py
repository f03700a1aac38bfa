"""The two kinds of soft targets: of a teacher that runs beside the student, and from a cache.

Shapes: n targets of a part, s rows of them, v classes, k classes that a cache holds, d width of the hidden states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lowvram.compat.torch_autograd import keeps_graph
from lowvram.compress.distillation.features import Features
from lowvram.core.soft_targets import ROWS, SoftTargets

VALUES, IDS, REST = "values", "ids", "rest"  # the tensors of a part's soft targets from a cache


@final
class LiveSoftTargets(SoftTargets):
    """What a teacher has just computed.

    Args:
        outputs: its hidden states (..., d) before `head`; without a head its logits (..., v).
        features: what its blocks have returned; None: it isn't compared.
    """

    def __init__(
        self,
        alpha: float,
        temperature: float,
        outputs: Tensor,
        head: nn.Linear | None,
        features: Features | None = None,
    ) -> None:
        super().__init__(alpha, temperature)
        self.outputs, self.head, self.features = outputs.flatten(0, -2), head, features

    def log_probabilities(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """The teacher's at this temperature (s, v)."""
        outputs = self.outputs[rows]
        if self.head is not None:
            with torch.autocast(outputs.device.type, enabled=False):  # it computes in the format of its weights
                outputs = nn.functional.linear(outputs, self.head.weight, self.head.bias)
        return torch.log_softmax(outputs.to(dtype).div(self.temperature), -1)

    def divergence(self, rows: slice, log_p_sv: Tensor) -> Tensor:
        log_q_sv = self.log_probabilities(rows, log_p_sv.dtype)
        log_ratio_sv = log_q_sv - log_p_sv
        q_sv = log_q_sv.exp_()
        log_p_sv.exp_().sub_(q_sv)
        return log_ratio_sv.mul_(q_sv).masked_fill_(q_sv == 0, 0).sum(-1)  # what never happens adds 0


class Likeliest(NamedTuple):
    """A teacher's likeliest classes of each row, and the logarithm of the probability of all others together."""

    log_q_sk: Tensor
    ids_sk: Tensor
    log_rest_s: Tensor

    @classmethod
    def of(cls, log_q_sv: Tensor, num_classes: int) -> Likeliest:
        log_q_sk, ids_sk = log_q_sv.topk(num_classes, -1)
        return cls(log_q_sk, ids_sk, log_q_sv.scatter(-1, ids_sk, -torch.inf).logsumexp(-1))


@final
class CachedSoftTargets(SoftTargets):
    """What a cache holds. The divergence is that of k + 1 events: each of the likeliest classes, and any other.

    Args:
        tensors: `VALUES` (..., k), logarithms of probabilities; `IDS` (..., k), their classes; `REST` (...), the
            logarithm of the probability of all other classes together.
    """

    def __init__(self, alpha: float, temperature: float, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(alpha, temperature)
        self.values_nk, self.ids_nk = (tensors[name].flatten(0, -2) for name in (VALUES, IDS))
        self.rest_n = tensors[REST].flatten()

    def divergence(self, rows: slice, log_p_sv: Tensor) -> Tensor:
        dtype = log_p_sv.dtype
        ids_sk, rest_s = self.ids_nk[rows].long(), self.rest_n[rows].to(dtype)
        log_q_sk = self.values_nk[rows].to(dtype)
        log_sum_s = torch.logaddexp(log_q_sk.logsumexp(-1), rest_s)  # about 0: values were rounded
        log_q_sk, rest_s = log_q_sk - log_sum_s[:, None], rest_s - log_sum_s
        log_p_sk = log_p_sv.gather(-1, ids_sk)
        rest_p_s = log_p_sv.scatter(-1, ids_sk, -torch.inf).logsumexp(-1)
        q_sk, q_rest_s = log_q_sk.exp(), rest_s.exp()
        divergences_s = (q_sk * (log_q_sk - log_p_sk)).where(q_sk > 0, 0).sum(-1)  # what never happens adds 0
        divergences_s += (q_rest_s * (rest_s - rest_p_s)).where(q_rest_s > 0, 0)
        # Of any other class the teacher's share is that of the student.
        q_sv = (log_p_sv + (rest_s - rest_p_s)[:, None]).exp_().scatter_(-1, ids_sk, q_sk)
        log_p_sv.exp_().sub_(q_sv)
        return divergences_s


@final
class SoftLoss(torch.autograd.Function):
    """The sum of `SoftTargets.loss` over those rows of logits (n, v) that count. The gradient is computed together with
    it, some rows at a time, so that it is the only tensor of its size that is kept."""

    @staticmethod
    def forward(ctx: Any, logits_nv: Tensor, counts_n: Tensor, soft: SoftTargets) -> Tensor:
        exact = torch.promote_types(logits_nv.dtype, torch.float32)
        loss, has_backward = logits_nv.new_zeros((), dtype=exact), ctx.needs_input_grad[0]
        # Not in fp16, in which it would be too small before the loss scale multiplies it.
        dtype = exact if logits_nv.dtype is torch.float16 else logits_nv.dtype
        gradient_nv = torch.empty_like(logits_nv, dtype=dtype) if has_backward else None
        for first in range(0, len(logits_nv), ROWS):
            rows = slice(first, first + ROWS)
            losses_s, gradient_sv = soft.loss(rows, logits_nv[rows])
            loss += losses_s.where(counts_n[rows], 0).sum()
            if gradient_nv is not None:
                gradient_nv[rows] = gradient_sv.mul_(counts_n[rows, None])
        ctx.save_for_backward(gradient_nv)
        ctx.dtype = logits_nv.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient_nv,) = ctx.saved_tensors
        factor = loss_gradient.to(gradient_nv.dtype) if gradient_nv.dtype is torch.float64 else loss_gradient
        scaled = gradient_nv * factor if keeps_graph() else gradient_nv.mul_(factor)
        return scaled.to(ctx.dtype), None, None
