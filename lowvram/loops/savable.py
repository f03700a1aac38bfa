"""Whether the state of a run can be saved: asked before work depends on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from lowvram.config.errors import Incompatible
from lowvram.core.ranks import rank
from lowvram.core.readable import groups_in, unreadable

MEND = "keep it as a tensor, a number or a text, or elsewhere"
OWNERS = {"model": "model", "stepper": "optimizer"}  # whose state each part is, for messages


@final
class Savable:
    """Checks the states of a run.

    Args:
        state: before the first step.

    Raises:
        Incompatible: a snapshot can't hold it.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._groups, self._is_told = groups_in(state["stepper"]), False
        if found := self._wrong(state):
            raise Incompatible(found)

    def check(self, state: Mapping[str, Any], step: int) -> bool:
        """Whether a snapshot can hold the state after a step. Raises Incompatible if it can't after step 1. Later no
        more than that is lost: the run goes on, and a line says so."""
        found = self._wrong(state)
        if found and step == 1:
            raise Incompatible(found)
        if found and not self._is_told and rank() == 0:
            print(f"warning: from step {step} on no snapshot can be saved, only the weights at the end: {found}")
            self._is_told = True
        return not found

    def _wrong(self, state: Mapping[str, Any]) -> str | None:
        for part, owner in OWNERS.items():
            if place := unreadable(state[part]):
                return f"{owner}: snapshots can't hold its state, as {place}: {MEND}"
        if groups_in(state["stepper"]) != self._groups:
            return "optimizer: snapshots can't hold its state, as it changes its parameter groups while it trains"
        return None
