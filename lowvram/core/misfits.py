"""Errors of torch in a step that a knob causes where the model's code doesn't fit it: refusals that name the knob."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from lowvram.config.errors import Incompatible

if TYPE_CHECKING:
    from torch import Tensor

    from lowvram.core.knob import Knob
    from lowvram.core.rig import Part, Rig, Run

# For knobs whose backward pass is a function of lowvram's own.
ONCE: Mapping[str, str] = {
    "trying to differentiate twice": "gradients aren't differentiated again, as those of an energy's forces are: leave"
    " it at its neutral option",
}
# For knobs with which only some of the model's weights train.
TAKES_PART: Mapping[str, str] = {
    "does not require grad": "weights that train take part in the loss of every step: choose adapter=none, or let the"
    " model leave no blocks out",
}


def with_reasons(run: Run, knobs: Mapping[str, Knob]) -> Run:
    """A `Rig.run` that raises Incompatible where one of the knobs knows why torch fails (`Knob.misfits`)."""
    return partial(_run, run, knobs) if any(knob.misfits for knob in knobs.values()) else run


def _run(run: Run, knobs: Mapping[str, Knob], rig: Rig, parts: list[Part], total: Tensor) -> Tensor:
    try:
        return run(rig, parts, total)
    except RuntimeError as error:
        words = str(error)
        for name, knob in knobs.items():
            for pattern, need in knob.misfits.items():
                if re.search(pattern, words):
                    raise Incompatible(f"{name} needs that {need} (torch: {brief(words)})") from error
        raise


def brief(words: str) -> str:
    """The line of an error's text that says what happened: TorchScript's come after a traceback."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    return lines[-1 if "Traceback" in words else 0].rstrip(".") if lines else ""
