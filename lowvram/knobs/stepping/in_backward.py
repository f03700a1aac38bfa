"""stepping=in_backward: each gradient is used and freed as soon as it is computed, so only a few exist at a time.

Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources" (LOMO, 2023); PyTorch,
"How to save memory by fusing the optimizer step into the backward pass".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowvram.core.gradient_sink import GradientSink
from lowvram.core.hooks import when_accumulated
from lowvram.core.knob import Fact, Kind, Knob, Stage
from lowvram.core.ledger import announce
from lowvram.core.rig import MakeOptimizer, Rig, is_finite
from lowvram.core.shards import SquareSum, local
from lowvram.core.stepper import Update
from lowvram.knobs.stepping.after_backward import AfterBackward
from lowvram.knobs.stepping.device_sums import DeviceSums
from lowvram.knobs.stepping.host_sums import HostSums
from lowvram.knobs.stepping.one_by_one import OneByOneStepper
from lowvram.knobs.stepping.scaling import check_clip, factor, is_plain, rescale
from lowvram.knobs.stepping.sums import Sums
from lowvram.knobs.stepping.totals import Bf16, Int8

Optimizers = dict[nn.Parameter, torch.optim.Optimizer]
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

    def __post_init__(self) -> None:
        check_clip(self.clip)

    def needs(self) -> frozenset[Fact]:
        walked_twice = {Fact.RETAINABLE_GRAPH} if self.norm is Norm.two_passes else set()
        compiled = {Fact.KERNEL_COMPILER} if self.sums is not SumsIn.host else set()
        separate = {Fact.SEPARATE_UPDATES, Fact.SEPARATE_MEMORY, Fact.REAL_WEIGHTS}
        return frozenset({Fact.PLAIN_BACKWARD, *separate, *walked_twice, *compiled})

    def breaks(self) -> frozenset[Fact]:
        return frozenset({Fact.GRADS_AT_UPDATE})

    def caveat(self, model: nn.Module) -> str | None:
        if self.sums is not SumsIn.host:
            return f"gradients of several parts are summed in {self.sums.name} (stepping.sums=host sums them in fp32)"
        if self.clip is None or self.norm is not Norm.last_step:
            return None
        return "a step of one part is clipped by the norm of the step before it (stepping.norm=host clips by its own)"

    def reference(self) -> AfterBackward:
        return AfterBackward(self.clip)

    def remedies(self) -> Mapping[Kind, int]:
        return {Kind.GRADIENTS: 10}

    def apply(self, rig: Rig) -> Rig:
        sums = self.sums.room_for(rig.trainable)
        return replace(rig, stepper=InBackwardStepper(rig.trainable, rig.make_optimizer, sums, self.clip, self.norm))


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
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        make_optimizer: MakeOptimizer,
        sums: Sums,
        clip: float | None,
        norm: Norm,
    ) -> None:
        self.vectors = [parameter for parameter in parameters if is_small_vector(parameter)]
        super().__init__(parameters, make_optimizer, self.vectors)
        self.sums, self.clip, self.norm = sums, clip, norm
        self.last_norm: Tensor | None = None
        self.strategy: Strategy = AtOnce(self.optimizers, None)
        for parameter in parameters:
            if not is_small_vector(parameter):
                when_accumulated(parameter, self.use)

    def use(self, parameter: nn.Parameter) -> None:
        """Called when autograd has computed the parameter's gradient; sets it to None afterwards."""
        if parameter.grad is None:  # all of it went into a sink
            return
        announce(parameter.grad, Kind.GRADIENTS)
        self.strategy.use([parameter])
        parameter.grad = None

    def use_vectors(self) -> None:
        """The same for small vectors, called after a backward pass."""
        if arrived := [vector for vector in self.vectors if vector.grad is not None]:
            self.strategy.use(arrived)
            drop_gradients(arrived)

    def begin(self, num_parts: int, divisor: Tensor | float = 1.0) -> None:
        drop_gradients(self.vectors)  # of a backward pass that failed
        self.strategy = self.choose(num_parts, divisor)

    def choose(self, num_parts: int, divisor: Tensor | float) -> Strategy:
        """The strategy of one step. Gradients of several parts must be summed somewhere, and with a loss scale a step
        must be able to change nothing."""
        if num_parts == 1 and is_plain(divisor):
            if self.clip is None:
                return AtOnce(self.optimizers, None)
            if self.norm is Norm.last_step and self.last_norm is not None:
                return AtOnce(self.optimizers, factor(self.last_norm, self.clip, divisor))
        if num_parts == 1 and self.norm is Norm.two_passes:
            return TwoPasses(self.optimizers, self.clip, divisor)
        self.sums.begin(num_parts)
        if isinstance(self.sums, DeviceSums) and self.clip is None and is_plain(divisor):
            return WithLastPart(self.optimizers, self.sums, num_parts)
        return Summed(self.optimizers, self.sums, self.clip, divisor)

    def backward(self, loss: Tensor) -> None:
        self.strategy.backward(loss)
        self.use_vectors()

    def sink_of(self, parameter: Tensor) -> GradientSink | None:
        if isinstance(parameter, nn.Parameter) and parameter in self.optimizers:
            return self.strategy.sink_of(parameter)
        return None

    def update(self) -> Update:
        update = self.strategy.finish()
        self.use_vectors()  # if it ran another backward pass
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


class Strategy(ABC):
    """How the gradients of one step are used."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """The backward pass of one part."""

    @abstractmethod
    def use(self, parameters: Sequence[nn.Parameter]) -> None:
        """Use the new gradient of a parameter, or those of several small vectors, which are freed when this returns."""

    def sink_of(self, parameter: nn.Parameter) -> GradientSink | None:
        """Where the running backward pass may add the parameter's gradient a few rows at a time, without a call of
        `use`; None if the whole gradient is needed."""
        del parameter
        return None

    @abstractmethod
    def finish(self) -> Update:
        """Called when all gradients have been computed."""


@final
class AtOnce(Strategy):
    """One backward pass: every gradient is multiplied by `by` (None: not at all), used, and freed."""

    def __init__(self, optimizers: Optimizers, by: Tensor | None) -> None:
        self.optimizers, self.by = optimizers, by
        self.squares = SquareSum()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def use(self, parameters: Sequence[nn.Parameter]) -> None:
        measure(parameters, self.squares)
        update_with(parameters, self.optimizers, self.by)

    def finish(self) -> Update:
        norm = self.squares.total().sqrt()
        return Update(norm, is_finite(norm))


@final
class TwoPasses(Strategy):
    """Two backward passes over the graph: the first sums the squares of gradients, the second updates."""

    def __init__(self, optimizers: Optimizers, clip: float | None, divisor: Tensor | float) -> None:
        self.optimizers, self.clip, self.divisor = optimizers, clip, divisor
        self.squares = SquareSum()
        self.loss: Tensor | None = None
        self.use_now: Callable[[Sequence[nn.Parameter]], None] = partial(measure, squares=self.squares)

    def backward(self, loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        self.loss = loss

    def use(self, parameters: Sequence[nn.Parameter]) -> None:
        self.use_now(parameters)

    def finish(self) -> Update:
        norm = self.squares.total().sqrt() / self.divisor
        loss, self.loss = self.loss, None
        applied = is_finite(norm)
        if applied and loss is not None:
            by = factor(norm, self.clip, self.divisor)
            self.use_now = partial(update_with, optimizers=self.optimizers, by=by)
            loss.backward()
        return Update(norm, applied)


@final
class Summed(Strategy):
    """Gradients are summed over the parts; then they are brought back and used, one by one."""

    def __init__(self, optimizers: Optimizers, sums: Sums, clip: float | None, divisor: Tensor | float) -> None:
        self.optimizers, self.sums, self.clip, self.divisor = optimizers, sums, clip, divisor

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def use(self, parameters: Sequence[nn.Parameter]) -> None:
        self.sums.take(parameters)

    def sink_of(self, parameter: nn.Parameter) -> GradientSink | None:
        return self.sums.sink_of(parameter)

    def finish(self) -> Update:
        norm = self.sums.squares().total().sqrt() / self.divisor
        applied = is_finite(norm)
        if applied:
            by = factor(norm, self.clip, self.divisor)
            for parameters in by_optimizer(self.sums.with_gradient(), self.optimizers):
                bring_back(parameters, self.sums)
                update_with(parameters, self.optimizers, by)
                drop_gradients(parameters)
        return Update(norm, applied)


@final
class WithLastPart(Strategy):
    """Gradients are summed over all parts but the last. In the last one's backward pass each gradient is used at once,
    with its sum, which is freed. What goes into a sink there waits for the end of the step, in few bits."""

    def __init__(self, optimizers: Optimizers, sums: DeviceSums, num_parts: int) -> None:
        self.optimizers, self.sums, self.num_left = optimizers, sums, num_parts
        self.squares = SquareSum()

    def backward(self, loss: Tensor) -> None:
        self.num_left -= 1
        loss.backward()

    def use(self, parameters: Sequence[nn.Parameter]) -> None:
        if self.num_left:
            self.sums.take(parameters)
        else:
            self.sums.add_to(parameters)
            self.use_now(parameters)

    def sink_of(self, parameter: nn.Parameter) -> GradientSink | None:
        return self.sums.sink_of(parameter)

    def use_now(self, parameters: Sequence[nn.Parameter]) -> None:
        measure(parameters, self.squares)
        update_with(parameters, self.optimizers, None)

    def finish(self) -> Update:
        # Of these the last part had no gradient, or added it to a sink.
        for parameters in by_optimizer(self.sums.with_gradient(), self.optimizers):
            bring_back(parameters, self.sums)
            self.use_now(parameters)
            drop_gradients(parameters)
        norm = self.squares.total().sqrt()
        return Update(norm, is_finite(norm))


def is_small_vector(parameter: nn.Parameter) -> bool:
    """A sharded parameter isn't one: its gradient may be a view of those of a whole block, and keep them alive."""
    return parameter.ndim <= 1 and parameter.numel() <= SMALL_NUMEL and not isinstance(parameter, DTensor)


def by_optimizer(parameters: Iterable[nn.Parameter], optimizers: Optimizers) -> Iterable[list[nn.Parameter]]:
    """The parameters, those that share an optimizer together."""
    groups: dict[torch.optim.Optimizer, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(optimizers[parameter], []).append(parameter)
    return groups.values()


def bring_back(parameters: Iterable[nn.Parameter], sums: Sums) -> None:
    for parameter in parameters:
        sums.bring_back(parameter)


def drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def measure(parameters: Sequence[nn.Parameter], squares: SquareSum) -> None:
    for parameter in parameters:
        assert parameter.grad is not None
        squares.add(local(parameter.grad), parameter)


def update_with(parameters: Sequence[nn.Parameter], optimizers: Optimizers, by: Tensor | None) -> None:
    """Update parameters that share an optimizer with their gradients, multiplied by `by`."""
    rescale([parameter.grad for parameter in parameters if parameter.grad is not None], by)
    optimizers[parameters[0]].step()
