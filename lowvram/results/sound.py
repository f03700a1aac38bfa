"""Checks the types of a row that was read: files can be damaged, or edited by hand. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from lowvram.results.metrics import METRICS

Test = Callable[[Any], bool]
Kind = tuple[str, Test]  # a type's name in messages, and its test; null is always allowed


def is_number(value: Any) -> bool:
    is_small = isinstance(value, float) or (
        isinstance(value, int) and abs(value) < 2**1000
    )  # larger integers don't fit a float
    return is_small and not isinstance(value, bool) and math.isfinite(value)


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def all_are(test: Test) -> Test:
    """A test that a value is a mapping whose values all pass `test`."""
    return lambda value: isinstance(value, Mapping) and all(item is None or test(item) for item in value.values())


NUMBER: Kind = ("a number", is_number)
TEXT: Kind = ("text", is_text)
TRUTH: Kind = ("true or false", lambda value: isinstance(value, bool))
VALUES: Kind = ("keys with values", lambda value: isinstance(value, Mapping))
NUMBERS: Kind = ("keys with numbers", all_are(is_number))
TEXTS: Kind = ("keys with texts", all_are(is_text))
LIST: Kind = ("a list of keys with values", lambda value: isinstance(value, list) and all(map(VALUES[1], value)))

KINDS: Mapping[str, Kind] = {  # of all values that aren't numbers
    **dict.fromkeys(("id", "name", "status", "reason", "disturbed", "semantics_changed", "model.blocks"), TEXT),
    **dict.fromkeys(("logged.name", "logged.group"), TEXT),
    **dict.fromkeys(("memory.source", "memory.by_kind_reason", "fidelity.reason", "plan.reason"), TEXT),
    **dict.fromkeys(("gradient.noise_scale_reason", "pruning.left", "growing.left"), TEXT),
    **dict.fromkeys(("provenance.git_sha", "provenance.lowvram", "provenance.torch", "provenance.driver"), TEXT),
    **dict.fromkeys(("provenance.device_name", "provenance.python", "provenance.started", "provenance.command"), TEXT),
    **dict.fromkeys(("compiled", "provenance.dirty", "time.is_cut", "plan.fits"), TRUTH),
    **dict.fromkeys(("memory.by_kind", "memory.by_kind_max", "plan.by_kind"), NUMBERS),
    **dict.fromkeys(("attempts", "reruns", "ranks"), LIST),
    **dict.fromkeys(("config", "config.train", "config.accum", "plan", "fidelity"), VALUES),
    "choices": TEXTS,
}
# Keys that tables and reports read from sections that are null or empty in an empty row.
INNER = {
    "config": ("train", "accum"),
    "config.train": ("batch_size",),
    "config.accum": ("parts",),
    "plan": ("reason", "fits", "by_kind"),
    "fidelity": ("reason", "steps"),
}
OF_LISTS = {
    "attempts": {"parts": NUMBER},
    "reruns": {"step_ms_p50": NUMBER, "reason": TEXT, "status": TEXT, "disturbed": TEXT},
}
SIZES = ("_bytes", "_ms")  # endings of the names of a plan's numbers


def fault(row: Mapping[str, Any], empty: Mapping[str, Any], statuses: Collection[str]) -> str | None:
    """The first thing wrong with a row, in words; None if all is right.

    Args:
        empty: a row in which nothing is known.
    """
    if row["status"] is not None and row["status"] not in statuses:
        return f"status={row['status']!r}: must be one of {', '.join(sorted(statuses))}"
    for key in (key for key, without in empty.items() if isinstance(without, Mapping)):
        if not isinstance(row[key], Mapping):
            return f"{key}={row[key]!r}: must be keys with values"
    for path, value, (words, is_one) in _checks(row, empty):
        if value is not None and not is_one(value):
            return f"{path}={value!r}: must be {words}"
    return None


def _checks(row: Mapping[str, Any], empty: Mapping[str, Any]) -> Iterator[tuple[str, Any, Kind]]:
    """Each value with its path and expected kind; a mapping precedes its values."""
    for key, without in empty.items():
        if isinstance(without, Mapping) and key not in KINDS:
            yield from ((f"{key}.{name}", row[key][name], KINDS.get(f"{key}.{name}", NUMBER)) for name in without)
        else:
            yield key, row[key], KINDS.get(key, NUMBER)
            yield from _inner(key, row[key])
    yield from ((f"eval.{name}", value, NUMBER) for name, value in row["eval"].items() if name not in empty["eval"])
    yield from ((f"plan.{name}", value, NUMBER) for name, value in (row["plan"] or {}).items() if name.endswith(SIZES))
    for key, kinds in OF_LISTS.items():
        with_all: Kind = (f"a list of keys with values: {', '.join(kinds)}", kinds.keys().__le__)
        for item in row[key] or ():
            yield key, item.keys(), with_all
            yield from ((f"{key}[…].{name}", item.get(name), kind) for name, kind in kinds.items())


def _inner(key: str, values: Any) -> Iterator[tuple[str, Any, Kind]]:
    figures = (metric.path.partition(".") for metric in METRICS)
    names = [name for section, _, name in figures if section == key and key in ("plan", "fidelity")]
    for name in (*INNER.get(key, ()), *names):
        path, value = f"{key}.{name}", (values or {}).get(name)
        yield path, value, KINDS.get(path, NUMBER)
        yield from _inner(path, value)
