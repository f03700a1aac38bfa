"""Steppers with one optimizer per parameter, so that each parameter can be updated by itself."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from lowvram.core.rates import set_rates
from lowvram.core.rig import MakeOptimizer
from lowvram.core.rounding import forget
from lowvram.core.stepper import Stepper


class OneByOneStepper(Stepper):
    """The base of these steppers: their optimizers, and what is kept of them.

    Args:
        together: parameters that are updated together, and share an optimizer.
    """

    def __init__(
        self, parameters: list[nn.Parameter], make_optimizer: MakeOptimizer, together: Sequence[nn.Parameter] = ()
    ) -> None:
        shared = dict.fromkeys(together, make_optimizer([*together])) if together else {}
        self.optimizers = {
            parameter: shared[parameter] if parameter in shared else make_optimizer([parameter])
            for parameter in parameters
        }

    def each(self) -> list[torch.optim.Optimizer]:
        """All optimizers, each once."""
        return [*dict.fromkeys(self.optimizers.values())]

    def forget(self, parameters: Collection[nn.Parameter]) -> None:
        for parameter in parameters:
            forget(self.optimizers[parameter].state, parameter)

    def set_lr(self, lr: float) -> None:
        for optimizer in self.each():
            set_rates(optimizer, lr)

    def owners(self) -> list[int]:
        """For each parameter the place of its optimizer in `each`. Which ones share one depends on the ranks."""
        places = {optimizer: place for place, optimizer in enumerate(self.each())}
        return [places[optimizer] for optimizer in self.optimizers.values()]

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [optimizer.state_dict() for optimizer in self.each()], "owners": self.owners()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved, own = state["optimizers"], self.owners()
        # Early versions of lowvram saved no owners, and the first of them had an optimizer for each parameter.
        theirs = state.get("owners", [*range(len(own))] if len(saved) == len(own) else own)
        if theirs != own:
            pieces = [apart(one) for one in saved]
            parts = [next(pieces[owner]) for owner in theirs]
            saved = [merged([parts[at] for at, one in enumerate(own) if one == place]) for place in range(max(own) + 1)]
        for optimizer, its_state in zip(self.each(), saved, strict=True):
            optimizer.load_state_dict(its_state)


def apart(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The states of optimizers of one parameter each, given that of one optimizer of all: what `merged` puts
    together."""
    places = [(group, place) for group in state["param_groups"] for place in group["params"]]
    if len(places) == 1:
        yield state
        return
    for group, place in places:
        own = {0: state["state"][place]} if place in state["state"] else {}
        yield {"state": own, "param_groups": [{**group, "params": [0]}]}


def merged(states: list[dict[str, Any]]) -> dict[str, Any]:
    """The state of an optimizer whose parameters are in one group, given those of optimizers of one of them each."""
    if len(states) == 1:
        return states[0]
    group = {**states[0]["param_groups"][0], "params": [*range(len(states))]}
    return {
        "state": {place: one["state"][0] for place, one in enumerate(states) if one["state"]},
        "param_groups": [group],
    }
