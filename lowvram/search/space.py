"""The space of a search: every combination of options that can be had together, and an estimate of each.

A plan takes a second, and there are thousands of combinations. So each option is planned alone, beside those that are
in use, and a combination is estimated from these few: what an option does to the time of a step, and to each kind of
memory, is taken to be the same factor whatever else is chosen. Estimates decide what is planned next, and nothing
else: what is ranked in the end was planned as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import prod
from typing import Any, NamedTuple, final

from omegaconf import DictConfig

from lowvram.config.errors import BadInput
from lowvram.config.registry import knob_of, node_of, options_of
from lowvram.config.schema import build
from lowvram.core.knob import Fact, Kind, Knob, conflicts

Option = tuple[str, str]  # group and name
Options = Mapping[str, str]  # one of each group that is searched
Plan = Mapping[str, Any]  # as a row holds it
HOST = Kind.HOST.value
EVEN = 1e-3  # relative: what differs by less is the same


@final
@dataclass(frozen=True)
class Space:
    """Options of several groups."""

    base: Options  # those in use
    knobs: Mapping[Option, Knob]  # of all options, those in use among them
    pairs: frozenset[frozenset[Option]]  # that can't be had together

    @property
    def names(self) -> dict[str, list[str]]:
        """By group, the option in use first."""
        others = {group: [name for one, name in self.knobs if one == group] for group in self.base}
        return {group: sorted(names, key=lambda name: name != self.base[group]) for group, names in others.items()}

    @property
    def size(self) -> int:
        """How many combinations there are, with those that can't be had."""
        return prod(len(names) for names in self.names.values())

    def without(self, dropped: Mapping[Option, str]) -> Space:
        """The space without some options; one in use stays."""
        return replace(self, knobs={one: knob for one, knob in self.knobs.items() if one not in dropped})

    def singles(self) -> Iterator[tuple[Option, Options]]:
        """Each option beside those in use, where it can be had there."""
        for group, name in self.knobs:
            options = {**self.base, group: name}
            if name != self.base[group] and self.can_be_had(options):
                yield (group, name), options

    def combinations(self) -> Iterator[Options]:
        """All that can be had."""
        for chosen in product(*self.names.values()):
            options = dict(zip(self.names, chosen, strict=True))
            if self.can_be_had(options):
                yield options

    def changes(self, options: Options) -> Options:
        """Those that are not in use."""
        return {group: name for group, name in options.items() if name != self.base[group]}

    def can_be_had(self, options: Options) -> bool:
        return self.pairs.isdisjoint(map(frozenset, combinations(options.items(), 2)))


def space_of(
    base: Options, knobs: Mapping[Option, Knob], fixed: Mapping[str, Knob], absent: Mapping[Fact, str]
) -> tuple[Space, dict[Option, str]]:
    """The space of those options that can be had at all, and why others can't.

    Args:
        fixed: the knobs of other groups, by the names that messages use.
        absent: the facts that the device lacks.
    """
    common = conflicts(fixed, absent)
    refused: dict[Option, str] = {}
    for option, knob in knobs.items():
        reasons = [reason for reason in conflicts({**fixed, "=".join(option): knob}, absent) if reason not in common]
        if reasons:
            refused[option] = "; ".join(reasons)
    left = {option: knob for option, knob in knobs.items() if option not in refused or option[1] == base[option[0]]}
    pairs = frozenset(
        frozenset(pair)
        for pair in combinations(left, 2)
        if pair[0][0] != pair[1][0] and conflicts({"=".join(option): left[option] for option in pair}, {})
    )
    return Space(base, left, pairs), refused


class Estimate(NamedTuple):
    """What a combination is expected to need."""

    options: Options
    num_changes: int  # of options in use
    step_ms: float
    least_bytes: float


def estimate(options: Options, base: Plan, singles: Mapping[Option, Plan]) -> Estimate:
    """What a combination needs, from the plan of the options in use and those of single other options."""
    changes = [singles[option] for option in options.items() if option in singles]
    times = [change["step_ms"] / base["step_ms"] for change in changes]
    share = sum(kind_bytes(kind, base, changes) for kind in counted(base)) / sum(counted(base).values())
    least_bytes = base["least_vram_bytes"] * share
    return Estimate(options, len(changes), base["step_ms"] * prod(times), least_bytes)


def kind_bytes(kind: str, base: Plan, changes: Sequence[Plan]) -> float:
    """Multiplies the bytes in use by each option's factor; where nothing is in use, adds what each option needs."""
    before, after = counted(base)[kind], [counted(change)[kind] for change in changes]
    return before * prod(size / before for size in after) if before else float(sum(after))


def useless(base: Plan, single: Plan) -> str | None:
    """Why an option can't be part of any answer; None: it can."""
    if single["step_ms"] is None:
        return "its speed on this device isn't known"
    before, after = [(plan["step_ms"], plan["least_vram_bytes"], *counted(plan).values()) for plan in (base, single)]
    is_better = any(new < old * (1 - EVEN) for old, new in zip(before, after, strict=True))
    return None if is_better else "no kind of memory gets smaller, and no step faster"


def counted(plan: Plan) -> dict[str, int]:
    """The largest moment of each kind of memory that a budget is for: a CPU is its own host."""
    is_cpu = plan["reserved_bytes"] is None
    return {kind: size for kind, size in plan["by_kind_max"].items() if is_cpu or kind != HOST}


def variants_of(group: str, in_use: str, knob: Knob) -> tuple[dict[str, Knob], dict[str, str]]:
    """Every option of a group with the values that were changed in the one in use; and why others can't have them.

    Args:
        knob: of the option `in_use`, as it was changed.
    """
    neutral = knob_of((group, in_use))
    changed = {name: value for name, value in vars(knob).items() if getattr(neutral, name) != value}
    variants, refused = {in_use: knob}, dict[str, str]()
    for option in options_of(group):
        node = node_of(group, option)
        missing = [name for name in changed if name not in node]
        if missing:
            refused[option] = f"it has no {group}.{missing[0]}"
        elif option != in_use:
            try:
                variants[option] = build(DictConfig({**node, **changed}), group)
            except BadInput as error:
                refused[option] = str(error)
    return variants, refused
