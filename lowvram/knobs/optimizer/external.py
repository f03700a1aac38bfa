"""optimizer=external: any torch.optim.Optimizer that the user names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from omegaconf import MISSING
from torch import Tensor, nn
from torch.optim import Optimizer

from lowvram.compat.torch_modes import without_dispatch_modes
from lowvram.config.errors import BadInput, require
from lowvram.config.importing import check_args, import_object
from lowvram.config.texts import first_line
from lowvram.core.generators import same_draws_afterwards, seed_all
from lowvram.core.knob import Exactness, Fact, Knob, Stage
from lowvram.core.rig import Rig
from lowvram.core.savable import groups_in, unreadable
from lowvram.core.untouched import marking
from lowvram.knobs.optimizer.fp32_compute import PIECE_ELEMENTS, RoundingPolicy, with_fp32_compute
from lowvram.knobs.optimizer.groups import check_rates, decayed

TRIAL_STEPS = 3


class Unsavable(TypeError):
    """An optimizer's state can't be saved, or not loaded again."""


class Traits(NamedTuple):
    """What an update of one element depends on."""

    is_per_parameter: bool  # on nothing but its own parameter's gradients
    is_elementwise: bool  # on nothing but its own gradients


TRAITS: dict[str, Traits] = {}  # by the knob's fields, as text


@dataclass(frozen=True)
class External(Knob):
    """The class of an optimizer, or a function that makes one. Whether it may be given single parameters or parts of
    them is found by trying it on small tensors.

    Raises:
        BadInput: there is no such class, its arguments don't fit, or it can't update tensors without a closure.
    """

    target: str = MISSING
    lr: float = 1e-3
    args: dict[str, Any] | None = None

    stage = Stage.OPTIMIZER
    exactness = Exactness.LOSSY

    def __post_init__(self) -> None:
        decay = (self.args or {}).get("weight_decay", 0.0)
        is_fit = isinstance(decay, int | float) and decay >= 0
        require(is_fit, "optimizer.args.weight_decay", decay, "a number of at least 0")
        check_rates(self.lr, decay)
        maker = import_object(self.target, "optimizer.target")
        check_args(maker, self.target, {"params": [], "lr": self.lr, **(self.args or {})}, "optimizer.args")
        _ = self.traits

    @property
    def traits(self) -> Traits:
        if repr(self) not in TRAITS:
            try:
                TRAITS[repr(self)] = traits_of(self.plain)
            except Exception as error:
                if isinstance(error, BadInput):
                    raise
                allowed = f"an optimizer that updates dense tensors without a closure: {type(error).__name__}: {error}"
                if isinstance(error, Unsavable):
                    allowed = f"an optimizer whose state a snapshot can hold: {error}"
                raise BadInput("optimizer.target", self.target, allowed) from None
        return TRAITS[repr(self)]

    def needs(self) -> frozenset[Fact]:
        return frozenset() if self.traits.is_elementwise else frozenset({Fact.WHOLE_PARAMS})

    def breaks(self) -> frozenset[Fact]:
        return frozenset() if self.traits.is_per_parameter else frozenset({Fact.SEPARATE_UPDATES})

    def reference(self) -> External:
        return self

    def apply(self, rig: Rig) -> Rig:
        return replace(rig, make_optimizer=partial(self.make, policy=RoundingPolicy(rig.rounding)))

    def make(self, parameters: list[nn.Parameter], policy: RoundingPolicy) -> Optimizer:
        piece_elements = PIECE_ELEMENTS if self.traits.is_elementwise else None
        return marking(with_fp32_compute(self.plain(parameters), policy, piece_elements=piece_elements))

    def plain(self, parameters: list[nn.Parameter]) -> Optimizer:
        """The optimizer itself. As everywhere here, a weight decay leaves out biases and norms."""
        args: Mapping[str, Any] = self.args or {}
        groups = decayed(parameters, args["weight_decay"]) if "weight_decay" in args else parameters
        optimizer = import_object(self.target, "optimizer.target")(groups, lr=self.lr, **args)
        allowed = f"a class of torch.optim.Optimizer: this made a {type(optimizer).__name__}"
        require(isinstance(optimizer, Optimizer), "optimizer.target", self.target, allowed)
        return optimizer


def traits_of(make: Callable[[list[nn.Parameter]], Optimizer]) -> Traits:
    """Try an optimizer on two small parameters: together, each by itself, and in parts, as a sharded one would be."""
    with on_real_tensors():
        first, second = (torch.randn(TRIAL_STEPS, *shape) for shape in ((4, 6), (6,)))
        together = updated(make, [first, second])
        alone = updated(make, [first]) + updated(make, [second])
        halves = updated(make, [first[:, :2]]) + updated(make, [first[:, 2:]])
    is_per_parameter = all(map(torch.allclose, together, alone))
    return Traits(is_per_parameter, is_per_parameter and torch.allclose(torch.cat(halves), alone[0]))


def updated(make: Callable[[list[nn.Parameter]], Optimizer], gradients: list[Tensor]) -> list[Tensor]:
    """Parameters of ones after a step with each of the gradients (steps, ...)."""
    parameters = [nn.Parameter(torch.ones(each.shape[1:])) for each in gradients]
    optimizer = make(parameters)
    for step in range(TRIAL_STEPS):
        for parameter, of_steps in zip(parameters, gradients, strict=True):
            parameter.grad = of_steps[step].clone()
        optimizer.step()
    check_state(make, optimizer, parameters)
    return [parameter.detach() for parameter in parameters]


def check_state(
    make: Callable[[list[nn.Parameter]], Optimizer], optimizer: Optimizer, like: list[nn.Parameter]
) -> None:
    """Raises Unsavable if a snapshot can't hold the optimizer's state, or a new optimizer can't take it over."""
    state = optimizer.state_dict()
    if place := unreadable(state):
        raise Unsavable(f"{place}; keep it as a tensor, a number or a text, or elsewhere")
    again = make([nn.Parameter(each.detach()) for each in like])
    if groups_in(again.state_dict()) != groups_in(state):
        raise Unsavable("it changes its parameter groups while it trains, so that no snapshot could be loaded")
    try:
        again.load_state_dict(state)
    except Exception as error:
        raise Unsavable(f"a new one can't load it: {type(error).__name__}: {first_line(error)}") from error


@contextmanager
def on_real_tensors() -> Iterator[None]:
    """Inside, tensors are real and on the CPU, also during a plan. Random numbers drawn before and after are the
    same."""
    with without_dispatch_modes(), same_draws_afterwards(), torch.device("cpu"), torch.enable_grad():
        seed_all(0)
        yield
