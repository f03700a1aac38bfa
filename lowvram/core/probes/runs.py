"""How a model is told the positions of its tokens, where it is given a run of each sample's tokens."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from lowvram.core.structure import Stated


class As(Enum):
    """What an argument with positions holds of t tokens."""

    first = "the first position, a whole number"
    row = "all positions, (1, t)"
    line = "all positions, (t,)"


class Told(NamedTuple):
    """An argument of the model's forward pass, by its name."""

    argument: str
    how: As


TOLD = Stated[Told | None]("Which argument tells the model at which positions its tokens are?", None)
