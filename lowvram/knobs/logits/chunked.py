"""The last layer and the loss, for a chunk of targets at a time.

The gradients of a chunk are computed right after its logits, in the forward pass. That takes three matrix products, as
without chunks, not four as with recomputation (or with logits=tiled, which leaves the weight's to the backward pass).
Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training" (2024), do the same, and so does torch's
linear_cross_entropy since 2.13, which in 2.13 is wrong in bf16 on a CPU.

Shapes: n targets, c targets of a chunk, s rows of a chunk that are computed at a time, d width of the hidden states, v
classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule

from lowvram.compat.torch_autograd import keeps_graph
from lowvram.compat.torch_trees import tree_map_only
from lowvram.config.errors import require
from lowvram.core import host
from lowvram.core.fact import Fact, ModelFact
from lowvram.core.host_weights import visiting
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob, Neutral, Stage
from lowvram.core.lookup import Handover
from lowvram.core.misfits import ONCE
from lowvram.core.probes.stated import HAS_SOFT_TARGETS
from lowvram.core.rig import IGNORE, Part, Rig
from lowvram.core.soft_targets import SoftTargets
from lowvram.core.stepper import SinkOf, no_sink
from lowvram.core.structure import HEAD, unless
from lowvram.knobs.logits.tied import Tie
from lowvram.knobs.logits.tile import (
    StreamedCrossEntropy,
    Tiles,
    Way,
    WeightGradient,
    classes_of_a_tile,
    scaled,
    scales_of,
    second_pass,
)

SOFTMAX_ROWS = 128  # whose probabilities, which are in fp32, exist at a time


HARD_TARGETS = ModelFact(
    "the loss compares with targets alone",
    unless(
        lambda known: not known.get(HAS_SOFT_TARGETS),
        "this task has a teacher, whose predictions count, too: choose logits=chunked",
    ),
)


@dataclass(frozen=True)
class FullLogits(Neutral):
    """All logits of a part exist at a time."""

    stage = Stage.LOGITS


@dataclass(frozen=True)
class ChunkedLogits(Knob):
    """The logits of only `chunk_tokens` targets exist at a time, or of all where that takes less memory: see
    `targets_at_a_time`."""

    chunk_tokens: int = 512

    sums_weights: ClassVar[bool] = True  # whether the weight's gradient is summed over chunks
    stage = Stage.LOGITS
    band = 2e-6
    misfits = ONCE
    saves = Kind.ACTIVATIONS
    needs_always = frozenset({HEAD})
    breaks_always = frozenset({Fact.FULL_LOGITS})

    def __post_init__(self) -> None:
        require(self.chunk_tokens >= 1, "logits.chunk_tokens", self.chunk_tokens, "at least 1")

    def apply(self, rig: Rig) -> Rig:
        head = rig.structure.head
        assert head is not None  # HEAD
        head.forward = lambda input: input  # so the model returns hidden states, however it is called or compiled
        if isinstance(rig.model, FSDPModule) and len(rig.trainable) < len(list(rig.model.parameters())):
            rig.model.register_forward_hook(torch.compiler.disable(with_gradient), prepend=True)  # pyright: ignore[reportArgumentType]

        tie = Tie(rig.model, head)

        def forward(part: Part) -> LazyLogits:
            hidden = rig.forward(part)
            handover, sink_of = tie.handover_for(hidden), rig.stepper.sink_of
            return LazyLogits(hidden, head, self.chunk_tokens, handover, self.sums_weights, sink_of)

        def criterion(outputs: LazyLogits, part: Part) -> Tensor:
            return outputs.cross_entropy(part.targets, part.soft)

        return replace(rig, forward=forward, criterion=criterion)


@dataclass(frozen=True)
class TiledLogits(ChunkedLogits):
    """As `ChunkedLogits`, but the backward pass computes the logits again, and from them the weight's gradient, for a
    tile of classes at a time: it needs no sum over chunks, which in 16 bits is in fp32, and a stepper may take it tile
    by tile."""

    sums_weights = False
    needs_always = ChunkedLogits.needs_always | {HARD_TARGETS}


def with_gradient(model: nn.Module, inputs: Any, outputs: Any) -> Any:
    """A hook after a sharded model's forward pass: makes its outputs require gradients. FSDP reduces the head's
    gradients only after it has seen gradients of the model's outputs, and hidden states of a frozen model have none."""
    del model, inputs

    def required(tensor: Tensor) -> Tensor:
        is_bare = torch.is_grad_enabled() and tensor.is_floating_point() and not tensor.requires_grad
        return tensor.detach().requires_grad_() if is_bare else tensor

    return tree_map_only(Tensor, required, outputs)


@final
class LazyLogits:
    """The logits of `head` for hidden states (..., d), computed only in chunks. Matrix products are in the dtype that
    autocast prescribes where this object is made."""

    def __init__(
        self,
        hidden: Tensor,
        head: nn.Linear,
        chunk_tokens: int,
        handover: Handover | None = None,
        sums_weights: bool = True,
        sink_of: SinkOf = no_sink,
    ) -> None:
        self.hidden, self.head, self.chunk_tokens, self.handover = hidden, head, chunk_tokens, handover
        self.sums_weights, self.sink_of = sums_weights, sink_of
        self.dtype = dtype_of_products(head.weight, hidden.device)

    def cross_entropy(self, targets: Tensor, soft: SoftTargets | None = None) -> Tensor:
        """The sum over targets (...), in nats (0-dim, fp32 or wider); targets `IGNORE` don't count. With soft targets
        the loss is theirs."""
        weight, bias = self.head.weight, self.head.bias  # read only here: FSDP has gathered them by now
        hidden_nd, targets_n, handover = self.hidden.flatten(0, -2), targets.flatten(), self.handover
        bias = None if bias is None else visiting(bias, hidden_nd.device)
        is_streamed = host.holds(weight) and not self.sums_weights
        if host.holds(weight) and not is_streamed:
            weight = visiting(weight, hidden_nd.device, None if handover is None else handover.leave)
            handover = None
        sink = partial(self.sink_of, weight) if isinstance(weight, nn.Parameter) else lambda: None
        way = Way(self.chunk_tokens, self.dtype, torch.is_grad_enabled(), self.sums_weights, handover, sink, soft)
        function = StreamedCrossEntropy if is_streamed else ChunkedCrossEntropy
        return function.apply(hidden_nd, weight, bias, targets_n, way)  # pyright: ignore[reportReturnType]

    @torch.no_grad()
    def argmax(self, dim: int) -> Tensor:
        """The most likely class of each hidden state (...). `dim` must be -1; it is there because callers also pass
        ordinary logits."""
        assert dim == -1
        weight = in_dtype(visiting(self.head.weight, self.hidden.device), self.dtype)
        bias = None if self.head.bias is None else visiting(self.head.bias, self.hidden.device)
        bias = in_dtype(bias, self.dtype)
        chunks = self.hidden.flatten(0, -2).split(self.chunk_tokens)
        classes = [nn.functional.linear(chunk.to(self.dtype), weight, bias).argmax(-1) for chunk in chunks]
        return torch.cat(classes).view(self.hidden.shape[:-1])


def dtype_of_products(weight: Tensor, device: torch.device) -> torch.dtype:
    """The dtype in which a layer with this weight multiplies on the device: autocast's, or its own."""
    device_type = device.type
    is_cast = torch.is_autocast_enabled(device_type) and weight.dtype is not torch.float64
    return torch.get_autocast_dtype(device_type) if is_cast else weight.dtype


def in_dtype(tensor: Tensor | None, dtype: torch.dtype) -> Any:
    return None if tensor is None else tensor.to(dtype)


def targets_at_a_time(hidden_nd: Tensor, chunk_tokens: int, dtype: torch.dtype, sums_weights: bool) -> int:
    """The targets of a chunk. In 16 bits several chunks need a sum of the weight's gradients in fp32 (v, d), beside the
    gradient of one chunk, which a single chunk doesn't. Where that is more than the logits (n, v) of the other targets,
    there is one chunk of all."""
    num_targets, width = hidden_nd.shape
    size = max(1, min(chunk_tokens, num_targets))
    exact = torch.promote_types(dtype, torch.float32)
    spared_bytes = width * exact.itemsize if sums_weights and exact is not dtype else 0  # of each class
    return num_targets if size < num_targets and (num_targets - size) * dtype.itemsize <= spared_bytes else size


@final
class ChunkedCrossEntropy(torch.autograd.Function):
    """The sum of the cross-entropies of a linear layer's outputs, which are computed and dropped chunk by chunk.

    It rounds as without chunks: products in `dtype`, probabilities in fp32 (or wider). Sums over chunks are in fp32 (or
    wider), too.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_nd: Tensor, weight_vd: Tensor, bias_v: Tensor | None, targets_n: Tensor, way: Way
    ) -> Tensor:
        wanted = [way.has_backward and needed for needed in ctx.needs_input_grad[:3]]
        size = targets_at_a_time(hidden_nd, way.chunk_tokens, way.dtype, sums_weights=wanted[1] and way.sums_weights)
        is_tiled = wanted[1] and not way.sums_weights and size < len(hidden_nd)
        chunks = Chunks(hidden_nd, weight_vd, bias_v, targets_n, size, way, wanted, is_tiled)
        loss = hidden_nd.new_zeros((), dtype=chunks.exact)
        for first in range(0, len(hidden_nd), size):
            loss += chunks.loss(slice(first, first + size))
        gradients, ctx.factors = chunks.gradients()
        again = [hidden_nd, weight_vd, bias_v, chunks.targets_n1, chunks.log_sums_n1] if is_tiled else []
        ctx.save_for_backward(*gradients, *again)
        ctx.dtypes, ctx.way = [hidden_nd.dtype, weight_vd.dtype, weight_vd.dtype], way
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The saved gradients times that of the loss: in place, unless the graph is retained for another pass."""
        is_last = not keeps_graph()
        saved, again = ctx.saved_tensors[:3], ctx.saved_tensors[3:]
        of_weight = tiled_gradient(again, ctx.way, loss_gradient) if again else None
        gradients = [
            scaled(gradient, loss_gradient * factor, is_last, dtype)
            for gradient, factor, dtype in zip(saved, ctx.factors, ctx.dtypes, strict=True)
        ]
        if again:
            gradients[1] = of_weight
        if ctx.way.handover is not None:
            gradients[1] = ctx.way.handover.leave(gradients[1])
        return (*gradients, None, None)


def tiled_gradient(again: Sequence[Any], way: Way, loss_gradient: Tensor) -> Tensor | None:
    """The weight's gradient, computed for a tile of classes at a time; None if it has gone into the stepper's sink,
    where that of the embeddings will go, too."""
    hidden_nd, weight_vd, bias_v, targets_n1, log_sums_n1 = again
    size, sink = classes_of_a_tile(len(hidden_nd), len(weight_vd), way.chunk_tokens), way.sink()
    if way.handover is not None:
        way.handover.sink = sink
    size = size if sink is None else sink.rows_at_a_time(size)
    of_weight = WeightGradient.in_one_tensor(weight_vd) if sink is None else WeightGradient(weight_vd.dtype, sink.add)
    tiles = Tiles.of(hidden_nd, weight_vd, bias_v, targets_n1, size, way)
    second_pass(tiles, log_sums_n1, loss_gradient, of_weight)
    return of_weight.whole_vd


@final
class Chunks:
    """The buffers of one chunk, reused for all chunks, and the gradients summed over chunks."""

    def __init__(
        self,
        hidden_nd: Tensor,
        weight_vd: Tensor,
        bias_v: Tensor | None,
        targets_n: Tensor,
        size: int,
        way: Way,
        wanted: list[bool],
        is_tiled: bool,
    ) -> None:
        dtype = way.dtype
        self.exact, self.soft = torch.promote_types(dtype, torch.float32), way.soft
        self.hidden_nd, self.targets_n1 = hidden_nd, targets_n[:, None]
        self.dtype, self.has_backward = dtype, any(wanted)
        self.weight_vd, self.bias_v = in_dtype(weight_vd, dtype), in_dtype(bias_v, dtype)
        num_classes = len(weight_vd)
        self.logits_cv = weight_vd.new_empty(size, num_classes, dtype=dtype)
        self.log_p_sv = weight_vd.new_empty(min(size, SOFTMAX_ROWS), num_classes, dtype=self.exact)
        self.hidden_gradient_nd = weight_vd.new_empty(hidden_nd.shape, dtype=dtype) if wanted[0] else None
        self.bias_gradient_v = weight_vd.new_zeros(num_classes, dtype=self.exact) if wanted[2] else None
        is_whole = size >= len(hidden_nd)  # one chunk: there is nothing to sum
        self.logit_scale, self.hidden_scale = scales_of(dtype, len(hidden_nd) if is_tiled else size)
        self.log_sums_n1 = weight_vd.new_empty(len(hidden_nd), 1, dtype=self.exact)
        is_summed = wanted[1] and not is_tiled
        self.of_weight = SumOverChunks(self.weight_vd, dtype if is_whole else self.exact) if is_summed else None

    def gradients(self) -> tuple[list[Tensor | None], list[float]]:
        """The gradients of hidden states, weight and bias, and the factors by which they must still be multiplied."""
        of_weight = None if self.of_weight is None else self.of_weight.sum_vd
        gradients = [self.hidden_gradient_nd, of_weight, self.bias_gradient_v]
        return gradients, [1 / self.logit_scale, 1 / self.logit_scale / self.hidden_scale, 1.0]

    def loss(self, rows: slice) -> Tensor:
        """The loss of one chunk (0-dim); adds its gradients to those of the other chunks."""
        targets_c1, log_sums_c1 = self.targets_n1[rows], self.log_sums_n1[rows]
        counts_c1 = targets_c1 != IGNORE
        targets_c1 = targets_c1.where(counts_c1, 0)
        hidden_cd = self.hidden_nd[rows].where(counts_c1, 0).to(self.dtype)
        logits_cv = self.logits_cv[: len(hidden_cd)]
        if self.bias_v is None:
            torch.mm(hidden_cd, self.weight_vd.T, out=logits_cv)
        else:
            torch.addmm(self.bias_v, hidden_cd, self.weight_vd.T, out=logits_cv)
        firsts = range(rows.start, rows.start + len(hidden_cd), SOFTMAX_ROWS)
        parts = zip(
            firsts, *(each.split(SOFTMAX_ROWS) for each in (logits_cv, targets_c1, counts_c1, log_sums_c1)), strict=True
        )
        loss = torch.stack([self._softmax(*part) for part in parts]).sum()
        if self.has_backward:
            self._add_gradients(rows, hidden_cd, logits_cv, counts_c1)
        return loss

    def _softmax(
        self, first: int, logits_sv: Tensor, targets_s1: Tensor, counts_s1: Tensor, log_sums_s1: Tensor
    ) -> Tensor:
        """The loss of some rows of a chunk, `first` being the number of the first. Overwrites their logits with the
        gradient, p - 1 at the target, else p, without soft targets, and `log_sums_s1` with the logarithms of the sums
        of their exponentials."""
        log_p_sv = self.log_p_sv[: len(logits_sv)]
        exact_sv = logits_sv if self.dtype is self.exact else log_p_sv.copy_(logits_sv)
        torch.log_softmax(exact_sv, -1, out=log_p_sv)  # in place in 16 bits: each number is read before it is written
        log_p_s1 = log_p_sv.gather(1, targets_s1)
        torch.sub(logits_sv.gather(1, targets_s1), log_p_s1, out=log_sums_s1)
        loss = -log_p_s1.where(counts_s1, 0).sum()
        soft_gradient_sv = None
        if self.soft is not None:
            soft_s, soft_gradient_sv = self.soft.loss(slice(first, first + len(logits_sv)), logits_sv)
            loss = loss * (1 - self.soft.alpha) + soft_s.where(counts_s1[:, 0], 0).sum()
        if self.has_backward:
            gradient_sv = log_p_sv.exp_()
            gradient_sv.scatter_(1, targets_s1, gradient_sv.gather(1, targets_s1) - 1)
            if self.soft is not None and soft_gradient_sv is not None:
                gradient_sv.mul_(1 - self.soft.alpha).add_(soft_gradient_sv)
            if self.bias_gradient_v is not None:
                self.bias_gradient_v.addmv_(gradient_sv.T, counts_s1[:, 0].to(self.exact))
            logits_sv.copy_(gradient_sv.mul_(self.logit_scale) if self.logit_scale != 1.0 else gradient_sv)
        return loss

    def _add_gradients(self, rows: slice, hidden_cd: Tensor, gradient_cv: Tensor, counts_c1: Tensor) -> None:
        """Add the gradients of a chunk, given that of its logits. Ignored rows have hidden states of zero, so they add
        nothing to the weight's gradient."""
        if self.hidden_gradient_nd is not None:
            torch.mm(gradient_cv, self.weight_vd, out=self.hidden_gradient_nd[rows]).mul_(counts_c1)
        if self.of_weight is not None:
            self.of_weight.add(gradient_cv, hidden_cd.mul_(self.hidden_scale))


@final
class SumOverChunks:
    """Sums products, in fp32 or wider if there are several. `product_vd` is reused for each chunk: on a CPU, touching
    new memory takes as long as the product that is written to it."""

    def __init__(self, weight_vd: Tensor, sum_dtype: torch.dtype) -> None:
        self.sum_vd = weight_vd.new_zeros(weight_vd.shape, dtype=sum_dtype)
        self.product_vd = None if sum_dtype is weight_vd.dtype else torch.empty_like(weight_vd)

    def add(self, gradient_cv: Tensor, hidden_cd: Tensor) -> None:
        if self.product_vd is None:
            self.sum_vd.addmm_(gradient_cv.T, hidden_cd)
        else:
            self.sum_vd.add_(torch.mm(gradient_cv.T, hidden_cd, out=self.product_vd))
