"""How stepping=in_backward uses the gradients of one step: at once, in a second backward pass, or summed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from lowvram.config.errors import Incompatible
from lowvram.core.rig import is_finite
from lowvram.core.shards import SquareSum, local
from lowvram.core.stepper import GradientSink, Update
from lowvram.knobs.stepping.device_sums import DeviceSums
from lowvram.knobs.stepping.scaling import factor, rescale
from lowvram.knobs.stepping.sums import Sums

Optimizers = dict[nn.Parameter, torch.optim.Optimizer]
Names = Mapping[nn.Parameter, str]
INSTEAD = "choose stepping=cpu_offload or stepping=after_backward"


class Strategy(ABC):
    """How the gradients of one step are used."""

    def passes(self, loss: Tensor) -> Iterator[None]:
        """Run the backward passes of one part. Yields after each, when the caller has to use what waits for its end."""
        loss.backward()
        yield

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
class Arrivals:
    """Checks that each gradient is computed once in a backward pass: it is used at once, so it must be the whole one.

    It isn't where several backward passes run inside one another, as those of reentrant checkpoints do.
    """

    def __init__(self, names: Names) -> None:
        self.names = names
        self.seen: set[nn.Parameter] = set()

    def note(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raises Incompatible if one of these has had a gradient before."""
        for parameter in parameters:
            if parameter in self.seen:
                name = self.names.get(parameter, f"a weight of shape {tuple(parameter.shape)}")
                raise Incompatible(
                    "stepping=in_backward needs that a backward pass computes the gradient of each weight at once, and"
                    f" it computes that of {name} in several pieces, as reentrant checkpoints do, and functions that"
                    f" call backward() themselves: {INSTEAD}"
                )
            self.seen.add(parameter)


@final
class AtOnce(Strategy):
    """One backward pass: every gradient is multiplied by `by` (None: not at all), used, and freed."""

    def __init__(self, optimizers: Optimizers, names: Names, by: Tensor | None) -> None:
        self.optimizers, self.by = optimizers, by
        self.squares, self.arrivals = SquareSum(), Arrivals(names)

    def use(self, parameters: Sequence[nn.Parameter]) -> None:
        self.arrivals.note(parameters)
        measure(parameters, self.squares)
        update_with(parameters, self.optimizers, self.by)

    def finish(self) -> Update:
        norm = self.squares.total().sqrt()
        return Update(norm, is_finite(norm))


@final
class TwoPasses(Strategy):
    """Two backward passes over the graph: the first sums the squares of gradients, the second updates."""

    def __init__(self, optimizers: Optimizers, names: Names, clip: float | None, divisor: Tensor | float) -> None:
        self.optimizers, self.names, self.clip, self.divisor = optimizers, names, clip, divisor
        self.squares, self.arrivals = SquareSum(), Arrivals(names)
        self.is_measuring = True
        self.by: Tensor | None = None
        self.result: Update | None = None

    def passes(self, loss: Tensor) -> Iterator[None]:
        self.check_none_early()
        loss.backward(retain_graph=True)
        yield
        self.result = self.measured()
        if self.result.applied:
            self.is_measuring, self.arrivals = False, Arrivals(self.names)
            self.by = factor(self.result.grad_norm, self.clip, self.divisor)
            loss.backward()
            yield

    def check_none_early(self) -> None:
        """Raises Incompatible if a gradient was computed in the forward pass: there won't be a second one."""
        for early in (parameter for parameter in self.optimizers if parameter.grad is not None):
            raise Incompatible(
                "stepping.norm=two_passes needs that all gradients are computed in the step's own backward pass, and a"
                f" backward() in the forward pass computes that of {self.names.get(early, 'a weight')}: choose"
                " stepping.norm=host"
            )

    def use(self, parameters: Sequence[nn.Parameter]) -> None:
        self.arrivals.note(parameters)
        if self.is_measuring:
            measure(parameters, self.squares)
        else:
            update_with(parameters, self.optimizers, self.by)

    def finish(self) -> Update:
        return self.result or self.measured()  # without a backward pass, where nothing trains in this step

    def measured(self) -> Update:
        norm = self.squares.total().sqrt() / self.divisor
        return Update(norm, is_finite(norm))


@final
class Summed(Strategy):
    """Gradients are summed over the parts; then they are brought back and used, one by one."""

    def __init__(self, optimizers: Optimizers, sums: Sums, clip: float | None, divisor: Tensor | float) -> None:
        self.optimizers, self.sums, self.clip, self.divisor = optimizers, sums, clip, divisor

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

    def __init__(self, optimizers: Optimizers, names: Names, sums: DeviceSums, num_parts: int) -> None:
        self.optimizers, self.sums, self.num_left = optimizers, sums, num_parts
        self.squares, self.arrivals = SquareSum(), Arrivals(names)

    def passes(self, loss: Tensor) -> Iterator[None]:
        self.num_left -= 1
        return super().passes(loss)

    def use(self, parameters: Sequence[nn.Parameter]) -> None:
        if self.num_left:
            self.sums.take(parameters)
        else:
            self.arrivals.note(parameters)
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
    # Fused optimizers don't. So autograd raises an error where the rest of the backward pass reads an old value.
    increment_version([local(parameter) for parameter in parameters])
