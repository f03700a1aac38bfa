"""What each difference between the points of a sweep did, and which points are the best. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from lowvram.config.registry import neutral_options
from lowvram.config.settings import KNOB_GROUPS
from lowvram.results.columns import value_at
from lowvram.results.differing import flat_settings, value_text, varying_names
from lowvram.results.row import Row, Status

Settings = Mapping[str, str]  # what differs: a group's option, or a dotted key's value
LEAST_STEPS = 3  # of a waterfall: the baseline and two added choices
ACCUMULATION = "accum"  # saves only what a smaller batch would, so a waterfall draws it in grey


@dataclass(frozen=True)
class Effect:
    """What one choice did, as medians over all pairs of points that differ in nothing else."""

    name: str  # of the group or key
    value: str
    against: str
    pairs: tuple[tuple[int, int], ...]  # the point with it, the point without
    memory_ratio: float | None
    speed_ratio: float | None
    loss_ratio: float | None
    gradient_error: float | None


def ablations(rows: Sequence[Row]) -> list[Settings]:
    """Of each row the options and values that differ between rows. Values are compared within one option."""
    flat, varying = flat_settings(rows), varying_names(rows)
    return [{name: value_text(each[name]) for name in varying if name in each} for each in flat]


def baseline(rows: Sequence[Row]) -> int:
    """The point that others are compared with: of those that finished, the one closest to the defaults."""
    neutral = neutral_options()

    def place(i: int) -> tuple[bool, int]:
        changed = sum(rows[i]["choices"].get(group, option) != option for group, option in neutral.items())
        return rows[i]["status"] != Status.OK, changed

    return min(range(len(rows)), key=place)


def memory_bytes(row: Row) -> float | None:
    """The measured peak; of a row of mode=plan the planned one."""
    is_plan = row["choices"].get("mode") == "plan"
    return value_at(row, "plan.allocated_bytes" if is_plan else "memory.peak_bytes")


def samples_per_s(row: Row) -> float | None:
    """The measured rate; of a row of mode=plan the planned one."""
    planned_ms = value_at(row, "plan.step_ms")
    if row["choices"].get("mode") == "plan" and planned_ms:
        return row["config"]["train"]["batch_size"] / planned_ms * 1000
    return value_at(row, "throughput.samples_per_s")


def effects(rows: Sequence[Row], differing: Sequence[Settings], reference: int) -> list[Effect]:
    """The effect of each option and value against that of the point `reference`, in the order of the points."""
    finished = [i for i, row in enumerate(rows) if row["status"] == Status.OK]
    by_settings = {frozenset(differing[i].items()): i for i in reversed(finished)}
    pairs: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for i in finished:
        for name, value in differing[i].items():
            against = differing[reference].get(name)
            if against is None or value == against:
                continue
            without = by_settings.get(frozenset({**differing[i], name: against}.items()))
            if without is not None and rows[i]["memory"]["source"] == rows[without]["memory"]["source"]:
                pairs.setdefault((name, value), []).append((i, without))
    return [_effect(rows, name, value, differing[reference][name], couples) for (name, value), couples in pairs.items()]


def _effect(rows: Sequence[Row], name: str, value: str, against: str, pairs: list[tuple[int, int]]) -> Effect:
    ratios = [
        [_ratio(measure(rows[i]), measure(rows[j])) for i, j in pairs] for measure in (memory_bytes, samples_per_s)
    ]
    losses = [
        _ratio(value_at(rows[i], "loss.eval"), value_at(rows[j], "loss.eval"))
        for i, j in pairs
        if rows[i]["time"]["steps"] == rows[j]["time"]["steps"]  # a window that was cut short trained fewer steps
    ]
    errors = [value_at(rows[i], "fidelity.gradient_error") for i, _ in pairs]
    return Effect(name, value, against, tuple(pairs), *(_middle(values) for values in (*ratios, losses, errors)))


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _middle(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def frontier(rows: Sequence[Row]) -> list[int]:
    """The points that no other beats in both memory and speed, the smallest first; none if their peaks were measured in
    different ways."""
    candidates = [
        (memory, -speed, i)
        for i, row in enumerate(rows)
        if row["status"] == Status.OK and (memory := memory_bytes(row)) and (speed := samples_per_s(row))
    ]
    if len({rows[i]["memory"]["source"] for *_, i in candidates}) > 1:
        return []
    best, fastest = [], 0.0
    for _, slowness, i in sorted(candidates):
        if -slowness > fastest:
            best.append(i)
            fastest = -slowness
    return best


def waterfall(rows: Sequence[Row], differing: Sequence[Settings]) -> list[dict[str, Any]] | None:
    """The points of a sweep that adds knobs one by one, each with the knobs it added; None for any other sweep."""
    if len(rows) < LEAST_STEPS or any(name not in KNOB_GROUPS for settings in differing for name in settings):
        return None
    steps: list[dict[str, Any]] = [{"point": 0, "added": [], "is_accumulation": False}]
    before: set[tuple[str, str]] = set()
    for i in range(1, len(rows)):
        changed = set(differing[i].items()) - set(differing[0].items())
        if not changed > before:
            return None
        added = sorted(changed - before)
        names = [name for name, _ in added]
        steps.append(
            {"point": i, "added": ["=".join(choice) for choice in added], "is_accumulation": names == [ACCUMULATION]}
        )
        before = changed
    return steps
