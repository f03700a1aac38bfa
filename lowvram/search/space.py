"""The space of a search: every combination of options that are compatible, and an estimate of each.

A plan takes a second, and there are thousands of combinations. So each option is planned alone, with the options in use
in all other groups, and a combination is estimated from these few plans: each option is assumed to multiply the time of
a step, and each kind of memory, by the same factor whatever else is chosen. Estimates only decide which combinations
are planned next; the ranking uses plans of whole combinations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, product
from math import prod
from typing import Any, NamedTuple, final

from omegaconf import DictConfig

from lowvram.config.errors import BadInput
from lowvram.config.registry import knob_of, node_of, ready_options
from lowvram.config.schema import build
from lowvram.core.fact import Fact
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob, conflicts

Option = tuple[str, str]  # group and name
Options = Mapping[str, str]  # one of each group that is searched
Plan = Mapping[str, Any]  # as a row holds it
HOST = Kind.HOST.value
EVEN = 1e-3  # relative difference up to which two figures count as equal


@final
@dataclass(frozen=True)
class Space:
    """The options of several groups. "In use" are those of the typed configuration."""

    base: Options  # those in use
    knobs: Mapping[Option, Knob]  # of all options, including those in use
    pairs: frozenset[frozenset[Option]]  # that are incompatible

    @cached_property
    def names(self) -> dict[str, list[str]]:
        """By group, the option in use first."""
        others = {group: [name for one, name in self.knobs if one == group] for group in self.base}
        return {group: sorted(names, key=lambda name: name != self.base[group]) for group, names in others.items()}

    @property
    def size(self) -> int:
        """How many combinations there are, including incompatible ones."""
        return prod(len(names) for names in self.names.values())

    def without(self, dropped: Mapping[Option, str]) -> Space:
        """The space without some options."""
        return replace(self, knobs={one: knob for one, knob in self.knobs.items() if one not in dropped})

    def singles(self) -> Iterator[tuple[Option, Options]]:
        """Each option that isn't in use, with its combination with those in use in all other groups; only compatible
        ones."""
        for group, name in self.knobs:
            options = {**self.base, group: name}
            if name != self.base[group] and self.is_compatible(options):
                yield (group, name), options

    def combinations(self) -> Iterator[Options]:
        """All compatible combinations."""
        for chosen in product(*self.names.values()):
            options = dict(zip(self.names, chosen, strict=True))
            if self.is_compatible(options):
                yield options

    @cached_property
    def num_compatible(self) -> int:
        """How many combinations are compatible."""
        return sum(1 for _ in self.combinations())

    def changes(self, options: Options) -> Options:
        """Those of the options that are not in use."""
        return {group: name for group, name in options.items() if name != self.base[group]}

    def is_compatible(self, options: Options) -> bool:
        return self.pairs.isdisjoint(map(frozenset, combinations(options.items(), 2)))


def space_of(
    base: Options,
    knobs: Mapping[Option, Knob],
    fixed: Mapping[str, Knob],
    absent: Mapping[Fact, str],
    clashing: Iterable[tuple[Option, Option]] = (),
) -> tuple[Space, dict[Option, str]]:
    """The space of the options that are possible with `fixed` on the device, and the reasons why others aren't.

    Args:
        fixed: the knobs of other groups, by the names that messages use.
        absent: the facts that the device lacks.
        clashing: pairs that can't be had together, beside those whose facts say so.
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
    return Space(base, left, pairs | frozenset(map(frozenset, clashing))), refused


class Estimate(NamedTuple):
    """The estimated time and memory of a combination."""

    options: Options
    num_changes: int  # the number of options that aren't in use
    step_ms: float
    least_bytes: float


@final
class Estimator:
    """Estimates combinations from the plan of the options in use (`base`) and those with one other option each."""

    def __init__(self, base: Plan, singles: Mapping[Option, Plan]) -> None:
        self.step_ms, self.outside_bytes = base["step_ms"], outside_bytes(base)
        self.inside_bytes = base["least_vram_bytes"] - self.outside_bytes
        self.times = {option: plan["step_ms"] / base["step_ms"] for option, plan in singles.items()}
        self.base_kinds = counted(base)
        self.kinds = {option: counted(plan) for option, plan in singles.items()}

    def estimate(self, options: Options) -> Estimate:
        changes = [option for option in options.items() if option in self.times]
        estimated = sum(self.kind_bytes(kind, changes) for kind in self.base_kinds)
        share = estimated / sum(self.base_kinds.values())
        step_ms = self.step_ms * prod(self.times[option] for option in changes)
        return Estimate(options, len(changes), step_ms, self.outside_bytes + self.inside_bytes * share)

    def kind_bytes(self, kind: str, changes: Sequence[Option]) -> float:
        """The bytes of a kind: those of the options in use times each option's factor; if these have none, the sum over
        the options."""
        before, after = self.base_kinds[kind], [self.kinds[option][kind] for option in changes]
        return before * prod(size / before for size in after) if before else float(sum(after))


def outside_bytes(plan: Plan) -> float:
    """What the process needs beside the memory of tensors, such as CUDA's context: no option makes it smaller."""
    of_tensors = plan["allocated_bytes"] if plan["reserved_bytes"] is None else plan["reserved_bytes"]
    return max(0, plan["least_vram_bytes"] - of_tensors)


def useless(base: Plan, single: Plan) -> str | None:
    """Why an option can't improve anything; None if it may."""
    if single["step_ms"] is None:
        return "its speed on this device isn't known"
    before, after = [(plan["step_ms"], plan["least_vram_bytes"], *counted(plan).values()) for plan in (base, single)]
    is_better = any(new < old * (1 - EVEN) for old, new in zip(before, after, strict=True))
    return None if is_better else "no kind of memory gets smaller, and no step faster"


def counted(plan: Plan) -> dict[str, int]:
    """The maximum of each kind of memory that counts for the budget. On a CPU, host memory does."""
    is_cpu = plan["reserved_bytes"] is None
    return {kind: size for kind, size in plan["by_kind_max"].items() if is_cpu or kind != HOST}


def changed_values(group: str, in_use: str, knob: Knob) -> dict[str, Any]:
    """The values of an option that the user has changed."""
    unchanged = vars(knob_of((group, in_use))) if in_use in ready_options(group) else {}
    return {name: value for name, value in vars(knob).items() if unchanged.get(name) != value}


def variants_of(group: str, in_use: str, knob: Knob) -> tuple[dict[str, Knob], dict[str, str]]:
    """Every option of a group, with the values that the user has changed in the one in use; and the reasons why others
    can't have these values.

    Args:
        knob: of the option `in_use`, as it was changed.
    """
    changed, variants, refused = changed_values(group, in_use, knob), {in_use: knob}, dict[str, str]()
    for option in ready_options(group):
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
