"""The order of plans that fit, and which of them are of use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lowvram.search.space import Options, Plan


def ranked(plans: Sequence[Plan]) -> list[Plan]:
    """The useful ones, the fastest first; then those of no use (see `split_by_use`)."""
    useful, needless = split_by_use(plans)
    return [*useful, *needless]


def split_by_use(plans: Sequence[Plan]) -> tuple[list[Plan], list[Plan]]:
    """Plans that fit, the fastest first, in two lists: useful ones, and those with changes that aren't needed, since
    another one with fewer of these changes fits as well and is no slower."""
    ordered = sorted(plans, key=lambda plan: (plan["step_ms"], len(plan["changes"]), plan["least_vram_bytes"]))
    useful: list[Plan] = []
    needless: list[Plan] = []
    for plan in ordered:
        is_needless = adds_nothing(plan["changes"], plan["step_ms"], useful)
        (needless if is_needless else useful).append(plan)
    return useful, needless


def adds_nothing(changes: Options, step_ms: float, fitting: Iterable[Plan]) -> bool:
    """Whether a plan with fewer of these changes fits as well, and is no slower."""
    return any(plan["changes"].items() < changes.items() and plan["step_ms"] <= step_ms for plan in fitting)
