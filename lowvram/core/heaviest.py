"""Finds the steps that take the most memory, where other parameters train in other steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lowvram.core.ledger import ledger
from lowvram.core.rig import Part, Rig
from lowvram.core.step import step


def fix_heaviest(rig: Rig, batch: Part) -> None:
    """From here on train those parameters with which a step on `batch` takes the most memory, and make their
    optimizer's state. Takes steps, some under the ledger, unless the same parameters train in all steps."""

    def peak_bytes(fix: Callable[[], None]) -> int:
        fix()
        step(rig, batch)  # makes the optimizer's state
        with ledger(rig.model, rig.stepper, batch.tensors(), rig.device) as peak:
            step(rig, batch)
        return peak.peak_bytes

    choices = rig.heaviest if len(rig.heaviest) < 2 else [max(rig.heaviest, key=peak_bytes)]
    for fix in choices:
        fix()
        step(rig, batch)


def extremes(units: Sequence[int], num: int, sizes: Sequence[int]) -> list[frozenset[int]]:
    """Choices of `num` of the units, one of which takes the most memory: some of the first ones, whose activations may
    be the largest, as in a ResNet, together with the largest of the others."""
    num = min(num, len(units))
    choices = dict[tuple[int, ...], frozenset[int]]()  # by the sizes of its units: blocks of one size are alike
    for num_first in range(num, -1, -1):
        first = units[:num_first]
        largest = sorted(units[num_first:], key=lambda unit: -sizes[unit])[: num - num_first]
        chosen = [*first, *largest]
        choices.setdefault(tuple(sorted(sizes[unit] for unit in chosen)), frozenset(chosen))
    return list(choices.values())
