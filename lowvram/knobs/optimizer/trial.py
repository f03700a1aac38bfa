"""What an optimizer's update depends on, found by trying it on small tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowvram.compat.torch_modes import without_dispatch_modes
from lowvram.config.texts import first_line
from lowvram.core.generators import same_draws_afterwards, seed_all
from lowvram.core.rates import note_rates
from lowvram.core.savable import groups_in, unreadable
from lowvram.core.states import CHANGED, keep_own_settings
from lowvram.knobs.optimizer.fp32_compute import FP32ComputeOptimizer, RoundingPolicy
from lowvram.knobs.optimizer.state_formats import ALIGNMENT

Make = Callable[[list[nn.Parameter]], Optimizer]

SHAPES = ((4, ALIGNMENT), (6,), (3, 5))
# Sizes of the weights and of their gradients, and steps. Thresholds on norms lie between them. The first updates of
# optimizers that estimate their own step size, from 1e-6 on, are all alike.
SIZES = ((1.0, 1.0, 5), (0.0, 1e3, 5), (100.0, 1e-3, 40))
# Of the largest change of a tensor. What single elements round differs by far less, real dependences by far more.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}


class Unsavable(TypeError):
    """An optimizer's state can't be saved, or not loaded again."""


class Traits(NamedTuple):
    """What an update of one element depends on."""

    is_per_parameter: bool  # on nothing but its own parameter's gradients
    is_elementwise: bool  # on nothing but its own gradients
    has_stand_ins: bool  # it can be given one parameter (or piece) after the other in its parameters' place
    sets_lr: bool  # it changes the learning rates of its groups itself, or doesn't read them
    changes_groups: bool  # its steps change entries of its groups of parameters, such as a count or an average


class Trial(NamedTuple):
    """One set of weights and gradients."""

    weights: list[Tensor]
    gradients: list[Tensor]  # (steps, ...) of each weight

    def of(self, index: int, cut: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Trial:
        """One of the weights, or a part of it. `cut` must leave the dimensions before the last two as they are."""
        return Trial([cut(self.weights[index])], [cut(self.gradients[index])])

    def parameters(self) -> list[nn.Parameter]:
        return [nn.Parameter(each.clone()) for each in self.weights]

    def changes(self, optimizer: Optimizer, parameters: list[nn.Parameter]) -> list[Tensor]:
        """How each parameter changes in a step with each of the gradients."""
        seed_all(1)
        before = [parameter.detach().clone() for parameter in parameters]
        for step in range(len(self.gradients[0])):
            for parameter, of_steps in zip(parameters, self.gradients, strict=True):
                parameter.grad = of_steps[step].clone()
            optimizer.step()
        return [parameter.detach() - old for parameter, old in zip(parameters, before, strict=True)]

    def with_made(self, make: Make) -> list[Tensor]:
        parameters = self.parameters()
        return self.changes(make(parameters), parameters)


def traits_of(make: Make) -> Traits:
    """Try an optimizer on small parameters: together, each by itself, in parts, as a sharded one would be, and with
    stand-ins, as precision=bf16_pure does.

    Whether two ways agree is asked of the changes, in fp64, so that it doesn't depend on how large a step is. An
    optimizer that doesn't take fp64 is tried in fp32, from zeros.

    Raises:
        Unsavable: a snapshot can't hold the optimizer's state, or a new optimizer can't take it over.
    """
    with on_real_tensors():
        trials = trials_in(torch.float64)
        try:
            trials[0].with_made(make)
        except Exception:
            trials = trials_in(torch.float32)
        found = [traits_in(make, trial) for trial in trials]
        return Traits(
            all(each.is_per_parameter for each in found),
            all(each.is_elementwise for each in found),
            all(each.has_stand_ins for each in found),
            any(each.sets_lr for each in found) or not any(reads_its_rates(make, trial) for trial in trials),
            any(each.changes_groups for each in found),
        )


def trials_in(dtype: torch.dtype) -> list[Trial]:
    """In fp32 all weights begin at zero: beside larger ones small changes would be rounded off."""
    trials = []
    for size, of_gradients, num_steps in SIZES:
        scale = size if dtype is torch.float64 else 0.0
        weights = [torch.randn(shape, dtype=dtype) * scale for shape in SHAPES]
        gradients = [drifting(shape, num_steps, dtype) * of_gradients for shape in SHAPES]
        trials.append(Trial(weights, gradients))
    return trials


def drifting(shape: tuple[int, ...], num_steps: int, dtype: torch.dtype) -> Tensor:
    """Gradients that have a direction in common, as real ones have at first: without it, no optimizer would enlarge its
    steps."""
    return torch.randn(shape, dtype=dtype) + 0.5 * torch.randn(num_steps, *shape, dtype=dtype)


def traits_in(make: Make, trial: Trial) -> Traits:
    sets_lr = changes_its_rates(make, trial)
    make = partial(marked, make) if sets_lr else make
    parameters = trial.parameters()
    optimizer = make(parameters)
    keep_own_settings(optimizer)
    together = trial.changes(optimizer, parameters)
    changes_groups = any(CHANGED in group for group in optimizer.state_dict()["param_groups"])
    check_state(make, optimizer, parameters, trial)
    alone = [trial.of(index).with_made(make)[0] for index in range(len(trial.weights))]
    is_per_parameter = agree(together, alone)
    is_elementwise = is_per_parameter and agree(alone[:1], [in_parts(make, trial, -1)])
    is_elementwise = is_elementwise and agree(alone[:1], [in_parts(make, trial, -2)])
    has_stand_ins = is_per_parameter and agree_with_stand_ins(make, trial, together, is_elementwise)
    return Traits(is_per_parameter, is_elementwise, has_stand_ins, sets_lr, changes_groups)


def changes_its_rates(make: Make, trial: Trial) -> bool:
    parameters = trial.parameters()
    optimizer = make(parameters)
    rates = [float(group.get("lr", 0.0)) for group in optimizer.param_groups]
    trial.changes(optimizer, parameters)
    return rates != [float(group.get("lr", 0.0)) for group in optimizer.param_groups]


def reads_its_rates(make: Make, trial: Trial) -> bool:
    """Whether halved learning rates make other steps."""
    parameters = trial.parameters()
    optimizer = make(parameters)
    for group in optimizer.param_groups:
        group["lr"] = float(group.get("lr", 0.0)) / 2
    return not agree(trial.with_made(make), trial.changes(optimizer, parameters))


def marked(make: Make, parameters: list[nn.Parameter]) -> Optimizer:
    """An optimizer that is marked as one that sets its rates itself, so that they belong to its state."""
    optimizer = make(parameters)
    note_rates(optimizer, 1.0, sets_lr=True)
    return optimizer


def in_parts(make: Make, trial: Trial, dim: int) -> Tensor:
    """The changes of the first weight where each half of it has an optimizer of its own."""
    halves = [
        trial.of(0, lambda tensor, half=half: tensor.chunk(2, dim)[half].contiguous()).with_made(make)[0]
        for half in range(2)
    ]
    return torch.cat(halves, dim)


def agree_with_stand_ins(make: Make, trial: Trial, wanted: list[Tensor], is_elementwise: bool) -> bool:
    parameters = trial.parameters()
    try:
        outer = FP32ComputeOptimizer(make(parameters), RoundingPolicy(), {}, ALIGNMENT if is_elementwise else None)
        return agree(wanted, trial.changes(outer, parameters))
    except Exception:  # of any class of the user's own
        return False


def agree(wanted: list[Tensor], found: list[Tensor]) -> bool:
    """Whether changes are the same, but for rounding."""
    return all(
        torch.allclose(
            b,
            a,
            rtol=0.0,
            atol=TOLERANCE[a.dtype] * float(a.nan_to_num(posinf=0, neginf=0).abs().max()),
            equal_nan=True,
        )
        for a, b in zip(wanted, found, strict=True)
    )


def check_state(make: Make, optimizer: Optimizer, parameters: list[nn.Parameter], trial: Trial) -> None:
    """Raises Unsavable if a snapshot can't hold the optimizer's state, or a new optimizer can't take it over, or goes
    on otherwise. The steps that this takes change the parameters."""
    state = optimizer.state_dict()
    if place := unreadable(state):
        raise Unsavable(f"{place}; keep it as a tensor, a number or a text, or elsewhere")
    copies = [nn.Parameter(each.detach().clone()) for each in parameters]
    again = make(copies)
    if groups_in(again.state_dict()) != groups_in(state):
        raise Unsavable("it changes its parameter groups while it trains, so that no snapshot could be loaded")
    keep_own_settings(again)
    try:
        again.load_state_dict(deepcopy(state))  # else both would share its tensors
        resumed = trial.changes(again, copies)
    except Exception as error:
        raise Unsavable(f"a new one can't load it: {type(error).__name__}: {first_line(error)}") from error
    if not agree(trial.changes(optimizer, parameters), resumed):
        raise Unsavable(
            "a new one that loads it makes other steps: keep counts and averages in `state` or `param_groups`, not in"
            " attributes"
        )


@contextmanager
def on_real_tensors() -> Iterator[None]:
    """Inside, tensors are real and on the CPU, also during a plan. Random numbers drawn before and after are the
    same."""
    with without_dispatch_modes(), same_draws_afterwards(), torch.device("cpu"), torch.enable_grad():
        seed_all(0)
        yield
