"""How a model is told the positions of its tokens, where it computes a run of each sample's tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowvram.config.errors import require
from lowvram.core.structure import Stated, Structure

NAMES = ("position_ids", "positions", "input_pos", "pos_ids", "pos")  # usual ones of arguments with positions


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


def ways_to_tell(known: Structure, inputs: Any, named: str | None = None) -> Iterator[Told | None]:
    """Those to be tried; None: the model isn't told.

    Args:
        named: the argument that the user names; None: as is found.

    Raises:
        BadInput: the model has no such argument.
    """
    arguments = signature(known.model.forward).parameters
    if named is not None:
        allowed = f"an argument of the model's forward: one of {', '.join(arguments)}"
        require(named in arguments, "sharding.positions", named, allowed)
    elif (stated := known.get(TOLD)) is not None:
        yield stated
        return
    given = inputs if isinstance(inputs, dict) else {}
    for name in NAMES if named is None else (named,):
        if name in arguments and name not in given:
            yield from (Told(name, how) for how in (As.row, As.line, As.first))
    if named is None:
        yield None


@contextmanager
def positions_told(model: nn.Module, told: Told | None, mine: slice, device: torch.device) -> Iterator[None]:
    """Inside it the model is told at which positions its tokens are."""
    if told is None:
        yield
        return

    def with_positions(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return inputs, {**named, told.argument: positions(told.how, mine, device)}

    handle = model.register_forward_pre_hook(with_positions, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def positions(how: As, mine: slice, device: torch.device) -> int | Tensor:
    if how is As.first:
        return mine.start
    line = torch.arange(mine.start, mine.stop, device=device)
    return line[None] if how is As.row else line
