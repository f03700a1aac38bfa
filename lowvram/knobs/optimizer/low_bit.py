"""AdamW whose moments are kept in 8 or 4 bits, in blocks with a scale each.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2021); Li et al., "Memory Efficient Optimizers with
4-bit States" (2023). The updates are torchao's, one compiled kernel per shape of a parameter.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowvram.compat.torch_fake import is_fake
from lowvram.compat.torch_modes import is_traceable_wrapper_subclass, without_dispatch_modes
from lowvram.compat.torchao import new_moment, part_of_moment
from lowvram.config.errors import Incompatible
from lowvram.core.fact import Fact
from lowvram.core.fused import CompiledUpdate
from lowvram.core.kept_apart import SHARDS, is_laid_out_as, keep_apart, whole_of
from lowvram.core.kind import Kind
from lowvram.core.knob import Exactness, Knob
from lowvram.core.quiet import quiet
from lowvram.core.shards import local, place_of_own, placed, spread_as, taken_apart
from lowvram.knobs.optimizer.fp32_compute import PIECE_ELEMENTS, STEP, RoundingPolicy, noise_of_step
from lowvram.knobs.optimizer.groups import AdamKnob, decayed
from lowvram.knobs.optimizer.plain import AdamW

MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # and whether their values may be negative
ORDER = "order"  # in saved states: see `memory_order`
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
        return AdamW(**asdict(self))

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
        own = without_memory(local(parameter.detach()))
        moments = {name: new_moment(self.inner, own, signed) for name, signed in MOMENTS.items()}
        spread = {name: keep_apart(spread_as(parameter, moment)) for name, moment in moments.items()}
        return {STEP: torch.tensor(0.0), **spread}

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

    def state_dict(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = super().state_dict()
        numbers = (number for group in saved["param_groups"] for number in group["params"])
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        orders = {number: memory_order(parameter) for number, parameter in zip(numbers, parameters, strict=True)}
        states = {key: {**state, ORDER: orders[key]} for key, state in saved["state"].items()}
        return {**saved, "state": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Codes in the same blocks stay as they are. Others, such as those of another number of ranks, are rounded
        again to codes in the blocks of this run."""
        saved = state_dict["state"]
        rest = {
            key: {name: value for name, value in state.items() if name not in (*MOMENTS, ORDER)}
            for key, state in saved.items()
        }
        super().load_state_dict({**state_dict, "state": rest})
        for group, own in zip(state_dict["param_groups"], self.param_groups, strict=True):
            for key, parameter in zip(group["params"], own["params"], strict=True):
                if key in saved:
                    self.state[parameter] |= self.moments_of(parameter, saved[key])

    def moments_of(self, parameter: nn.Parameter, saved: dict[str, Any]) -> dict[str, Tensor]:
        """A parameter's saved moments, in the form that they have in this run."""
        order = memory_order(parameter)
        fresh = self.new_state(nn.Parameter(parameter.detach().permute(order)) if is_permuted(order) else parameter)
        for name in MOMENTS:
            fill(local(fresh[name]), saved[name], parameter, saved.get(ORDER))
        return {name: fresh[name] for name in MOMENTS}


@torch.no_grad()
def fill(moment: Tensor, saved: Any, parameter: nn.Parameter, saved_order: list[int] | None) -> None:
    """Give a new moment, or this rank's shard of it, the values of a saved one.

    Args:
        saved: as `gathered` leaves it, or of this very process.
        saved_order: see `memory_order`; None: an early version's, which is that of this run.
    """
    if isinstance(saved, DTensor):
        moment.copy_(local(saved))
        return
    if isinstance(saved, Mapping):
        shards, saved_order = saved[SHARDS], [*range(parameter.ndim)]
        if isinstance(parameter, DTensor) and is_laid_out_as(saved, parameter):
            own = shards[place_of_own(parameter)[0]]
            if form_of(own) == form_of(moment):
                moment.copy_(own)
                return
        saved = whole_of(saved, list(map(as_numbers, shards)))
    if saved_order is None and isinstance(parameter, DTensor) and parameter.ndim > 2:
        raise Incompatible(
            "an early version of lowvram saved the moments of few bits, and not in which order those of convolutions"
            " are: go on without sharding, as it was saved, or start again"
        )
    order = memory_order(parameter)
    if isinstance(parameter, DTensor) or order != (saved_order or order):
        entire = as_numbers(saved).permute(inverse(saved_order or order))
        own = local(placed(entire, parameter)) if isinstance(parameter, DTensor) else entire.permute(order)
        moment.copy_(own.to(moment.device))
    else:
        moment.copy_(saved if form_of(saved) == form_of(moment) else as_numbers(saved).to(moment.device))


def as_numbers(moment: Tensor) -> Tensor:
    """A moment in fp32."""
    return torch.empty(moment.shape, device=moment.device).copy_(moment) if has_codes(moment) else moment


def form_of(moment: Tensor) -> Any:
    """What two moments share if the codes of one mean the same in the other."""
    return taken_apart(moment)[1]


def memory_order(parameter: Tensor) -> list[int]:
    """The dimensions of a parameter as they follow each other in memory, the innermost last. torchao's blocks of a
    state are consecutive in memory."""
    if parameter.is_contiguous():
        return [*range(parameter.ndim)]
    return sorted(range(parameter.ndim), key=parameter.stride, reverse=True)


def inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def is_permuted(order: list[int]) -> bool:
    return order != sorted(order)


def without_memory(weight: Tensor) -> Tensor:
    """A tensor of the same shape in fp32, which holds a single number."""
    return weight.new_zeros((), dtype=torch.float32).expand(weight.shape)


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
    """The parameter; if it isn't contiguous (channels_last), a contiguous view of it, with its gradient: see
    `memory_order`."""
    assert parameter.grad is not None
    if parameter.is_contiguous() and parameter.grad.is_contiguous():
        return parameter
    order = memory_order(parameter)
    view = nn.Parameter(parameter.detach().permute(order))
    view.grad = parameter.grad.permute(order).contiguous()
    return view
