"""stepping=in_backward: each gradient is used and freed as soon as it is computed, so only a few exist at a time.

Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources" (LOMO, 2023); PyTorch,
"How to save memory by fusing the optimizer step into the backward pass".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, ClassVar, final

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowvram.core.fact import Fact, ModelFact
from lowvram.core.hooks import when_accumulated
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob, Stage
from lowvram.core.ledger import announce
from lowvram.core.probes.weights import REAL_WEIGHTS, SEPARATE_MEMORY
from lowvram.core.rig import MakeOptimizer, Rig
from lowvram.core.shards import local
from lowvram.core.stepper import GradientSink, Update
from lowvram.knobs.stepping.after_backward import AfterBackward
from lowvram.knobs.stepping.device_sums import DeviceSums
from lowvram.knobs.stepping.host_sums import HostSums
from lowvram.knobs.stepping.one_by_one import OneByOneStepper
from lowvram.knobs.stepping.scaling import check_clip, factor, is_plain
from lowvram.knobs.stepping.strategies import (
    AtOnce,
    Names,
    Strategy,
    Summed,
    TwoPasses,
    WithLastPart,
    drop_gradients,
)
from lowvram.knobs.stepping.sums import Sums
from lowvram.knobs.stepping.totals import Bf16, Int8

SMALL_NUMEL = 2**16  # of a vector


class Norm(Enum):
    """Where the global norm comes from when it must be known before the first update: to clip, or to skip a step."""

    host = auto()  # the gradients wait until all are computed: in host memory, or where `SumsIn` says
    two_passes = auto()  # two backward passes over the graph: for the norm, then for the updates
    last_step = auto()  # clip by the norm of the step before


class SumsIn(Enum):
    """Where gradients are summed over the parts of a step. The names are what a user types."""

    host = auto()  # in host memory, in fp32
    bf16 = auto()  # on the device, in 2 bytes each
    int8 = auto()  # on the device, in 1 byte each, with a scale for each block of 128

    def room_for(self, parameters: list[nn.Parameter]) -> Sums:
        match self:
            case SumsIn.host:
                return HostSums(parameters)
            case SumsIn.bf16:
                return DeviceSums(Bf16)
            case SumsIn.int8:
                return DeviceSums(Int8)


@dataclass(frozen=True)
class InBackward(Knob):
    """Each gradient is used and freed as soon as it is computed."""

    clip: float | None = None
    norm: Norm = Norm.host
    sums: SumsIn = SumsIn.host

    stage = Stage.STEPPING
    saves = Kind.GRADIENTS
    misfits: ClassVar[Mapping[str, str]] = {
        "modified by an inplace operation": "a weight isn't read any more once its gradient is computed, and the"
        " backward pass reads one again, as where a model also computes with it detached or frozen: choose"
        " stepping=after_backward (if that fails alike, the model's own code writes in place)"
    }
    remedy = (Kind.GRADIENTS, 10)

    def __post_init__(self) -> None:
        check_clip(self.clip)

    def needs(self) -> frozenset[Fact | ModelFact]:
        walked_twice = {Fact.RETAINABLE_GRAPH} if self.norm is Norm.two_passes else set()
        compiled = {Fact.KERNEL_COMPILER} if self.sums is not SumsIn.host else set()
        separate = {Fact.SEPARATE_UPDATES, SEPARATE_MEMORY, REAL_WEIGHTS}
        return frozenset({Fact.PLAIN_BACKWARD, *separate, *walked_twice, *compiled})

    def breaks(self) -> frozenset[Fact]:
        """It can't leave an update out that began before all gradients were known, as without a norm to clip by; and
        sums of few bits are rounded by the number of the step."""
        knows_norm = self.clip is not None and self.norm is not Norm.last_step and self.sums is SumsIn.host
        return frozenset({Fact.GRADS_AT_UPDATE} if knows_norm else {Fact.GRADS_AT_UPDATE, Fact.UNDOABLE_STEPS})

    def caveat(self, model: nn.Module) -> str | None:
        if self.sums is not SumsIn.host:
            return f"gradients of several parts are summed in {self.sums.name} (stepping.sums=host sums them in fp32)"
        if self.clip is None or self.norm is not Norm.last_step:
            return None
        return "a step of one part is clipped by the norm of the step before it (stepping.norm=host clips by its own)"

    def reference(self) -> AfterBackward:
        return AfterBackward(self.clip)

    def clips_at(self) -> float | None:
        return self.clip

    def apply(self, rig: Rig) -> Rig:
        sums = self.sums.room_for(rig.trainable)
        names = {parameter: name for name, parameter in rig.model.named_parameters()}
        stepper = InBackwardStepper(rig.trainable, rig.make_optimizer, sums, self.clip, self.norm, names)
        return replace(rig, stepper=stepper)


@final
class InBackwardStepper(OneByOneStepper):
    """One optimizer per parameter, and one for all small vectors (biases, scales of norms). The strategy of a step is
    chosen when it begins.

    Gradients are used as autograd computes them. But those of small vectors wait until the backward pass ends: that
    takes hardly any memory, and less of the host's time than a hook and an update for each.

    Without clipping or a loss scale, gradients are used at once. If one of them isn't finite, `applied` is False, but
    parameters have already been updated, with that gradient too: only an earlier snapshot can be continued. With
    clipping or a loss scale such a step changes nothing; only norm=last_step without a loss scale can't detect it in
    time either.

    A gradient that a `backward()` of the model's own computes in a forward pass waits for the step's backward pass,
    which adds to it.

    Args:
        names: of the parameters, for messages.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        make_optimizer: MakeOptimizer,
        sums: Sums,
        clip: float | None,
        norm: Norm,
        names: Names | None = None,
    ) -> None:
        self.vectors = [parameter for parameter in parameters if is_small_vector(parameter)]
        super().__init__(parameters, make_optimizer, self.vectors)
        self.sums, self.clip, self.norm, self.names = sums, clip, norm, names or {}
        self.last_norm: Tensor | None = None
        self.strategy: Strategy = AtOnce(self.optimizers, self.names, None)
        self.is_running = False  # a backward pass of the step
        self.early: dict[nn.Parameter, None] = {}  # whose gradients came before it
        for parameter in parameters:
            if not is_small_vector(parameter):
                when_accumulated(parameter, self.use)

    def use(self, parameter: nn.Parameter) -> None:
        """Called when autograd has computed the parameter's gradient; sets it to None afterwards."""
        if parameter.grad is None:  # all of it went into a sink
            return
        announce(parameter.grad, Kind.GRADIENTS)
        if not self.is_running:
            self.early[parameter] = None
            return
        self.strategy.use([parameter])
        parameter.grad = None

    def use_waiting(self) -> None:
        """The same for small vectors, and for what came early and didn't come again; called after a backward pass."""
        early, self.early = [[parameter] for parameter in self.early], {}
        for group in (self.vectors, *early):
            if arrived := [parameter for parameter in group if parameter.grad is not None]:
                self.strategy.use(arrived)
                drop_gradients(arrived)

    def begin(self, num_parts: int, divisor: Tensor | float = 1.0) -> None:
        drop_gradients((*self.vectors, *self.early))  # of a backward pass that failed
        self.early, self.is_running = {}, False
        self.strategy = self.choose(num_parts, divisor)

    def choose(self, num_parts: int, divisor: Tensor | float) -> Strategy:
        """The strategy of one step. Gradients of several parts must be summed somewhere, and with a loss scale a step
        must be able to change nothing."""
        if num_parts == 1 and is_plain(divisor):
            if self.clip is None:
                return AtOnce(self.optimizers, self.names, None)
            if self.norm is Norm.last_step and self.last_norm is not None:
                return AtOnce(self.optimizers, self.names, factor(self.last_norm, self.clip, divisor))
        if num_parts == 1 and self.norm is Norm.two_passes:
            return TwoPasses(self.optimizers, self.names, self.clip, divisor)
        self.sums.begin(num_parts)
        if isinstance(self.sums, DeviceSums) and self.clip is None and is_plain(divisor):
            return WithLastPart(self.optimizers, self.names, self.sums, num_parts)
        return Summed(self.optimizers, self.sums, self.clip, divisor)

    def backward(self, loss: Tensor) -> None:
        self.is_running = True
        for _ in self.strategy.passes(loss):
            self.use_waiting()
        self.is_running = False

    def sink_of(self, parameter: Tensor) -> GradientSink | None:
        if isinstance(parameter, nn.Parameter) and parameter in self.optimizers:
            return self.strategy.sink_of(parameter)
        return None

    def update(self) -> Update:
        update = self.strategy.finish()
        if update.applied:
            self.last_norm = update.grad_norm.detach()
        return update

    def forget(self, parameters: Collection[nn.Parameter]) -> None:
        self.sums.forget(parameters)
        super().forget(parameters)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "last_norm": self.last_norm, "sums": self.sums.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if sums := state.get("sums"):  # none if it was saved with other sums, or before there were any
            self.sums.load_state_dict(sums)
        last_norm, device = state["last_norm"], local(next(iter(self.optimizers))).device
        self.last_norm = None if last_norm is None else last_norm.to(device)


def is_small_vector(parameter: nn.Parameter) -> bool:
    """A sharded parameter isn't one: its gradient may be a view of those of a whole block, and keep them alive."""
    return parameter.ndim <= 1 and parameter.numel() <= SMALL_NUMEL and not isinstance(parameter, DTensor)
