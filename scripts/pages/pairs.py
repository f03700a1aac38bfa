"""Which options can be had together, and whole configurations that hold every pair of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import combinations

from lowvram.config.registry import Option, all_options, knob_of, neutral_options, ready_options
from lowvram.core.fact import Fact
from lowvram.core.knob import conflicts

Row = frozenset[Option]  # a configuration: one option of each group, or of some


def label(options: Iterable[Option]) -> str:
    """Such as "precision=bf16 ckpt=every2", in the order of the groups."""
    return " ".join("=".join(option) for option in sorted(options, key=all_options().index))


def why_not(options: Iterable[Option], absent: Mapping[Fact, str]) -> list[str]:
    """The conflicts among options, and with a machine that lacks `absent`; one sentence each.

    The number of ranks follows the options: there are several if one of them needs that, else one.
    """
    knobs = {"=".join(option): knob_of(option) for option in options}
    many = any(Fact.MANY_RANKS in knob.needs() for knob in knobs.values())
    machine = {fact: why for fact, why in absent.items() if fact not in (Fact.MANY_RANKS, Fact.ONE_RANK)}
    return conflicts(knobs, machine | ({Fact.ONE_RANK: "it has several"} if many else {}))


def all_pairs(options: Collection[Option]) -> set[Row]:
    """Two options of different groups."""
    return {frozenset(pair) for pair in combinations(options, 2) if pair[0][0] != pair[1][0]}


def covering_rows(pairs: set[Row], why_not: Callable[[Row], list[str]]) -> list[Row]:
    """Whole configurations, without conflicts, that together hold every pair.

    Greedy: each row grows from a pair that is left, group by group, by the option that brings most new pairs (as in
    Cohen et al., "The AETG system", 1997), and takes another way where that leads to a conflict.

    Args:
        why_not: the conflicts among options.

    Raises:
        ValueError: a pair that fits by itself but into no whole configuration.
    """
    rows: list[Row] = []
    left = set(pairs)
    while left:
        first = min(left, key=sorted)
        row = _completed(first, left, why_not)
        if row is None:
            raise ValueError(f"{label(first)} fits by itself, but no whole configuration holds it")
        rows.append(row)
        left -= all_pairs(row)
    return rows


def _completed(row: Row, left: set[Row], why_not: Callable[[Row], list[str]]) -> Row | None:
    """A whole configuration around `row` with as many pairs of `left` as can be had greedily; None if there is none."""
    open_groups = [group for group in neutral_options() if group not in dict(row)]
    if not open_groups:
        return row
    group, neutral = open_groups[0], neutral_options()[open_groups[0]]
    options = sorted(
        ready_options(group), key=lambda option: option != neutral
    )  # where nothing is new, what costs nothing
    fitting = [row | {(group, option)} for option in options if not why_not(row | {(group, option)})]
    for candidate in sorted(fitting, key=lambda each: -len(all_pairs(each) & left)):
        whole = _completed(candidate, left, why_not)
        if whole is not None:
            return whole
    return None
