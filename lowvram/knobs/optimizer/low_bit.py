"""AdamW whose moments are kept in 8 or 4 bits, in blocks with a scale each.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2021); Li et al., "Memory Efficient Optimizers with
4-bit States" (2023). The updates are torchao's, one compiled kernel per shape of a parameter.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from lowvram.compat.torch_fake import is_fake
from lowvram.compat.torch_modes import is_traceable_wrapper_subclass, without_dispatch_modes
from lowvram.compat.torchao import new_moment, part_of_moment
from lowvram.core.fact import Fact
from lowvram.core.fused import CompiledUpdate
from lowvram.core.kind import Kind
from lowvram.core.knob import Exactness, Knob
from lowvram.core.quiet import quiet
from lowvram.core.shards import local
from lowvram.knobs.optimizer.fp32_compute import PIECE_ELEMENTS, STEP, RoundingPolicy, keep_formats, noise_of_step
from lowvram.knobs.optimizer.groups import AdamKnob, decayed
from lowvram.knobs.optimizer.plain import AdamW

LARGE_NUMEL = 4096  # torchao keeps the moments of smaller tensors in fp32


@dataclass(frozen=True)
class AdamW8bit(AdamKnob):
    """Two moments of 8 bits per parameter."""

    exactness = Exactness.LOSSY
    band = 2e-6  # of gradients at the same weights, which an optimizer doesn't touch
    saves = Kind.OPTIMIZER
    libraries = ("torchao.optim",)
    theirs: ClassVar[str] = "AdamW8bit"
    scratch_itemsizes: ClassVar[tuple[int, ...]] = ()  # bytes per element of an update's temporaries: it has none
    needs_always = frozenset({Fact.C_COMPILER, Fact.UNSPLIT_WEIGHTS})
    remedy = (Kind.OPTIMIZER, 10)

    def reference(self) -> AdamW:
        return AdamW(self.lr, self.beta1, self.beta2, self.eps, self.weight_decay)

    def make(self, parameters: list[nn.Parameter], policy: RoundingPolicy | None = None) -> torch.optim.Optimizer:
        policy = policy or RoundingPolicy()
        with quiet():
            kind = getattr(import_module("torchao.optim"), self.theirs)
        groups, betas = decayed(parameters, self.weight_decay), (self.beta1, self.beta2)
        inner = kind(groups, self.lr, betas, self.eps, bf16_stochastic_round=policy.rounding is not None)
        compute_levels(inner)
        return LowBit(inner, next(policy.numbers), self.scratch_itemsizes)


@dataclass(frozen=True)
class AdamW4bit(AdamW8bit):
    """Two moments of 4 bits per parameter."""

    theirs = "AdamW4bit"
    scratch_itemsizes = (4, 4, 8, 8)  # both moments in fp32, and the nearest code of each value as an int64
    remedy = (Kind.OPTIMIZER, 20)

    def improves_on(self, in_use: Knob) -> bool:
        return type(in_use) is AdamW8bit or super().improves_on(in_use)


@final
class LowBit(CompiledUpdate):
    """Adapts torchao's optimizer to the rest of the program: the learning rate is a plain number, states keep their
    dtype when they are loaded, and an update works under a dispatch mode and does nothing on fake tensors.

    Args:
        scratch_itemsizes: the bytes per element of each temporary that an update makes.
    """

    def __init__(self, inner: Any, number: int, scratch_itemsizes: tuple[int, ...]) -> None:
        super().__init__([{**group, "lr": float(group["lr"])} for group in inner.param_groups], {})
        self.param_groups[0] |= {"noise_of": number, "noise_step": 0, "codes": type(inner).__name__}
        self.inner, self.scratch_itemsizes = inner, scratch_itemsizes

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        stand_ins = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    stand_ins[parameter] = stand_in = contiguous(parameter)
                    self.state[parameter] = self.state[parameter] or self.new_state(stand_in)
        if not any(is_fake(local(parameter)) for parameter in stand_ins):
            self.run(stand_ins)

    def new_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The state that torchao makes for an fp32 weight, whatever the dtype of this one: moments of tensors too small
        for blocks of codes are then in fp32."""
        wide = without_memory(parameter.detach())
        moments = {
            "exp_avg": new_moment(self.inner, wide, signed=True),
            "exp_avg_sq": new_moment(self.inner, wide, signed=False),
        }
        return {STEP: torch.tensor(0.0), **moments}

    def scratch_bytes(self) -> Iterator[list[int]]:
        """As inductor's kernels of torch 2.13 ask for it, for each piece: the new scales of both moments, then
        temporaries as large as the piece. One kernel needs none of it where a weight has one dimension and its moments
        8 bits. Moments in fp32 are updated in place."""
        for parameter, state in self.state.items():
            moment: Any = local(state["exp_avg"])
            if parameter.grad is not None and has_codes(moment) and self.scratch_itemsizes:
                for start, end in self.pieces(moment.numel()):
                    scale_bytes = moment.scale.nbytes * (end - start) // moment.numel()
                    yield [scale_bytes] * 2 + [(end - start) * itemsize for itemsize in self.scratch_itemsizes]

    def pieces(self, numel: int) -> Iterator[tuple[int, int]]:
        """First element and end of each run of elements that is updated at a time, so that temporaries stay small.
        Whole blocks, as `PIECE_ELEMENTS` is a multiple of their size."""
        at_once = PIECE_ELEMENTS if self.scratch_itemsizes else numel
        for start in range(0, numel, at_once):
            yield start, min(start + at_once, numel)

    def in_pieces(self, weight: nn.Parameter, state: dict[str, Any]) -> dict[nn.Parameter, dict[str, Any]]:
        """The weight and its state in pieces of one dimension, which share their memory; as they are if the moments
        have no codes."""
        if not has_codes(state["exp_avg"]):
            return {weight: state}
        assert weight.grad is not None
        found, values, gradient, step = {}, weight.detach().view(-1), weight.grad.reshape(-1), state[STEP]
        for start, end in self.pieces(weight.numel()):
            piece = nn.Parameter(values[start:end])
            piece.grad = gradient[start:end]
            moments = {name: part_of_moment(value, start, end) for name, value in state.items() if name != STEP}
            found[piece] = {STEP: step if start == 0 else step.clone(), **moments}  # each update counts once
        return found

    def run(self, stand_ins: dict[Tensor, nn.Parameter]) -> None:
        """Run the update. The learning rate is passed as a tensor, since a number would be compiled in. Of DTensors
        only this rank's shards are passed: torch 2.13's cache of graphs mixes up DTensors of different shapes."""
        self.inner.param_groups = []
        for group in self.param_groups:
            states: dict[nn.Parameter, dict[str, Any]] = {}
            for parameter in group["params"]:
                if parameter in stand_ins:
                    state = {name: local(value) for name, value in self.state[parameter].items()}
                    states |= self.in_pieces(shard_of(stand_ins[parameter]), state)
            self.inner.param_groups.append({**group, "lr": torch.tensor(group["lr"]), "params": [*states]})
            self.inner.state |= states
        with noise_of_step(self.param_groups):
            compiled_step(self.inner)
        self.inner.param_groups, self.inner.state = [], defaultdict(dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        keep_formats(self, state_dict)


def without_memory(weight: Tensor) -> Tensor:
    """A tensor of the same shape in fp32, which holds a single number. One that is spread over ranks is copied."""
    return weight.new_zeros((), dtype=torch.float32).expand(weight.shape) if local(weight) is weight else weight.float()


def has_codes(moment: Any) -> bool:
    """Whether a moment is kept in few bits."""
    return is_traceable_wrapper_subclass(moment)


def compute_levels(optimizer: Any) -> None:
    """Make torchao compute the levels that its codes stand for, which it does once per process, with the first moment.
    In a plan that would happen on fake tensors, and every later optimizer in the process would use those."""
    with without_dispatch_modes():
        for signed in (True, False):
            new_moment(optimizer, torch.zeros(LARGE_NUMEL, device="cpu"), signed)


def compiled_step(optimizer: torch.optim.Optimizer) -> None:
    """Run torchao's compiled updates, which raise under a dispatch mode such as the ledger's."""
    with without_dispatch_modes(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the compiler
        optimizer.step()


def shard_of(parameter: nn.Parameter) -> nn.Parameter:
    """This rank's shard of a sharded parameter, with its gradient; any other parameter itself."""
    if local(parameter) is parameter:
        return parameter
    assert parameter.grad is not None
    shard = nn.Parameter(local(parameter.detach()))
    shard.grad = local(parameter.grad)
    return shard


def contiguous(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter; if it isn't contiguous (channels_last), a contiguous view of it, with its gradient. torchao's
    blocks of a state are consecutive in memory."""
    assert parameter.grad is not None
    if parameter.is_contiguous() and parameter.grad.is_contiguous():
        return parameter
    order = sorted(range(parameter.ndim), key=parameter.stride, reverse=True)
    view = nn.Parameter(parameter.detach().permute(order))
    view.grad = parameter.grad.permute(order).contiguous()
    return view
