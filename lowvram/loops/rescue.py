"""After an error in a step: a snapshot of the last whole step, so that no work is lost.

A step that has failed may have left the random numbers elsewhere, so those from before it are kept. Of several ranks
each one that fails leaves its shards in a file; the last one writes the snapshot of all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn

from lowvram.config.texts import first_line
from lowvram.core.untouched import Untouched
from lowvram.loops.session import NonFinite
from lowvram.loops.snapshot import random_state

MOST_NAMED = 2  # buffers that a message names


@final
class WholeStep:
    """A whole step and what it has left, as long as no later one changes the weights."""

    def __init__(self, step: int, model: nn.Module) -> None:
        self.step, self.random = step, random_state()
        self._model, self._untouched = model, Untouched(model)

    def rescue(self, error: BaseException, newest: int, save: Callable[[dict[str, Tensor]], Any]) -> None:
        """Save a snapshot after the step, and say so; or say why that isn't possible.

        Args:
            error: what ended the run after the step.
            newest: the step of the newest snapshot; 0 if there is none.
            save: is given the random state from after the step.
        """
        if newest == self.step:
            return
        if (why := self._lost_by(error)) is not None:
            say(f"step {self.step} can't be saved any more, since {why}: {newest_is(newest)}")
            return
        try:
            save(self.random)
        except Exception as failure:  # the first error counts
            why = f"{type(failure).__name__}: {first_line(failure)}"
            say(f"step {self.step} can't be saved ({why}): {newest_is(newest)}")
            return
        say(f"step {self.step + 1} has failed; step {self.step} is saved{self._but()}")

    def _lost_by(self, error: BaseException) -> str | None:
        """Why the step's weights are lost; None if they are still there."""
        if not self._untouched.is_still(error):
            return "the next one has changed weights before it failed"
        is_finite = not isinstance(error, NonFinite) or all(map(all_finite, self._model.parameters()))
        return None if is_finite else "its weights aren't finite"

    def _but(self) -> str:
        if not (names := self._untouched.changed_buffers()):
            return ""
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        return f" ({', '.join(names[:MOST_NAMED])}{more} already count samples of the next one)"


def newest_is(step: int) -> str:
    return f"the newest snapshot is of step {step}" if step else "there is no snapshot"


def all_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())


def say(text: str) -> None:
    """Tell the user. On stderr, as the last rank may be any."""
    print(text, file=sys.stderr)
