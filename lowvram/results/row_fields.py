"""Every field of a row, and what may stand there: the figures of `METRICS`, and the fields that are no figure, which
are listed here. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from lowvram.results.metrics import METRICS


@final
@dataclass(frozen=True)
class Kind:
    """What the value of a field may be, apart from null.

    Args:
        words: for messages.
        is_one: tests a value.
        items: of a list: the kinds of the keys that each item must have.
        is_null: whether the value of an empty row is null; else it is an empty mapping.
    """

    words: str
    is_one: Callable[[Any], bool]
    items: Mapping[str, Kind] = field(default_factory=dict)
    is_null: bool = True


def is_number(value: Any) -> bool:
    is_small = isinstance(value, float) or (
        isinstance(value, int) and abs(value) < 2**1000
    )  # larger integers don't fit a float
    return is_small and not isinstance(value, bool) and math.isfinite(value)


def is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def is_list(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_mapping, value))


def all_are(kind: Kind) -> Callable[[Any], bool]:
    """A test that a value is a mapping whose values are all of this kind, or null."""
    return lambda value: is_mapping(value) and all(item is None or kind.is_one(item) for item in value.values())


def list_of(items: Mapping[str, Kind]) -> Kind:
    return Kind(
        "a list of keys with values", lambda value: isinstance(value, list) and all(map(is_mapping, value)), items
    )


NUMBER = Kind("a number", is_number)
TEXT = Kind("text", lambda value: isinstance(value, str))
TRUTH = Kind("true or false", lambda value: isinstance(value, bool))
NUMBERS = Kind("keys with numbers", all_are(NUMBER))
VALUES = Kind("keys with values", is_mapping)
SECTION = Kind("keys with values", is_mapping, is_null=False)  # always there; so are its fields
OPEN = Kind("keys with values", is_mapping, is_null=False)  # always there, with whatever keys
CHOICES = Kind("keys with texts", all_are(TEXT), is_null=False)

# In the order of the row's sections. A field whose parent isn't a SECTION may be missing: its parent is null, or holds
# what another program has put there, such as the configuration.
OTHERS: Mapping[str, Kind] = {
    "schema": NUMBER,
    **dict.fromkeys(("id", "name"), TEXT),
    "index": NUMBER,
    **dict.fromkeys(("status", "reason"), TEXT),
    "logged": SECTION,
    **dict.fromkeys(("logged.name", "logged.group"), TEXT),
    "choices": CHOICES,
    "config": OPEN,
    **dict.fromkeys(("config.train", "config.accum"), VALUES),
    **dict.fromkeys(("config.train.batch_size", "config.train.steps", "config.accum.parts"), NUMBER),
    "compiled": TRUTH,
    "model": SECTION,
    **dict.fromkeys(("model.parameters", "model.trainable"), NUMBER),
    "model.blocks": TEXT,
    "memory": SECTION,
    "memory.source": TEXT,
    **dict.fromkeys(("memory.steady_peak_bytes", "memory.device_bytes", "memory.free_at_start_bytes"), NUMBER),
    **dict.fromkeys(("memory.process_peak_bytes", "memory.host_peak_bytes"), NUMBER),
    **dict.fromkeys(("memory.by_kind", "memory.by_kind_max"), NUMBERS),
    "memory.by_kind_reason": TEXT,
    "plan": VALUES,
    **dict.fromkeys(("plan.reason", "plan.solved", "plan.loop"), TEXT),
    "plan.fits": TRUTH,
    "plan.num_steps": NUMBER,
    "plan.by_kind": NUMBERS,
    **dict.fromkeys(("throughput", "data", "time"), SECTION),
    "time.steps": NUMBER,
    "time.is_cut": TRUTH,
    **dict.fromkeys(("time.forward_ms", "time.backward_ms", "time.update_ms"), NUMBER),
    **dict.fromkeys(("time.setup_s", "time.compile_s", "time.total_s", "time.data_wait_frac"), NUMBER),
    **dict.fromkeys(("traffic", "loss", "eval", "precision"), SECTION),
    **dict.fromkeys(("precision.skipped_steps", "precision.scale"), NUMBER),
    "training": SECTION,
    "training.ended_by": TEXT,
    "gradient": SECTION,
    "gradient.noise_scale_reason": TEXT,
    **{name: kind for what in ("pruning", "growing") for name, kind in ((what, SECTION), (f"{what}.left", TEXT))},
    "attempts": list_of({"parts": NUMBER}),
    "fidelity": VALUES,
    "fidelity.reason": TEXT,
    "fidelity.steps": NUMBER,
    **dict.fromkeys(("semantics_changed", "disturbed"), TEXT),
    "reruns": list_of({"step_ms_p50": NUMBER, "reason": TEXT, "status": TEXT, "disturbed": TEXT}),
    "ranks": list_of({}),
    "provenance": SECTION,
    "provenance.git_sha": TEXT,
    "provenance.dirty": TRUTH,
    **dict.fromkeys(("provenance.lowvram", "provenance.torch", "provenance.device_name"), TEXT),
    "provenance.device_memory_bytes": NUMBER,
    "provenance.driver": TEXT,
    **dict.fromkeys(("provenance.threads", "provenance.seed"), NUMBER),
    **dict.fromkeys(("provenance.python", "provenance.started", "provenance.command"), TEXT),
}
EVAL = "eval"  # the section whose further keys are scores of the task, or of the user's own functions
PLAN, SIZES = "plan", ("_bytes", "_ms")  # the section whose further numbers have names that end so


def row_fields() -> dict[str, Kind]:
    """The kind of every field by its path, figures included. A section comes before its fields, the figures of a
    section before the others."""
    figures: dict[str, dict[str, Kind]] = {}  # by their sections
    for metric in METRICS:
        figures.setdefault(metric.path.partition(".")[0], {})[metric.path] = NUMBER
    known: dict[str, Kind] = {}
    for path, kind in OTHERS.items():
        known |= {path: kind, **figures.pop(path, {})}
    for section, of_it in figures.items():  # sections with figures alone
        known |= {section: SECTION, **of_it}
    return known


def steps_of(path: str) -> list[str]:
    """The keys on the way to a field. A score's name may hold anything, dots too."""
    return path.split(".", 1) if path.startswith(f"{EVAL}.") else path.split(".")


def at(row: Mapping[str, Any], path: str) -> Any:
    """The value under a dotted path; None where there is none."""
    value: Any = row
    for key in steps_of(path):
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def nested(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Values by their paths as the sections of a row."""
    row: dict[str, Any] = {}
    for path, value in figures.items():
        *sections, name = steps_of(path)
        section = row
        for key in sections:
            section = section.setdefault(key, {})
        section[name] = value
    return row


def empty_fields() -> dict[str, Any]:
    """A row in which nothing is known: it has every section and every field of it, and every value is null."""
    known = row_fields()
    row: dict[str, Any] = {}
    for path, kind in known.items():
        section, _, name = path.rpartition(".")
        if not section:
            row[path] = None if kind.is_null else {}
        elif known.get(section) is SECTION:
            row[section][name] = None
    return row


def fault(row: Mapping[str, Any], statuses: Collection[str]) -> str | None:
    """The first thing wrong with a row, in words; None if all is right."""
    if row["status"] is not None and row["status"] not in statuses:
        return f"status={row['status']!r}: must be one of {', '.join(sorted(statuses))}"
    return next(_faults(row), None)


def _faults(row: Mapping[str, Any]) -> Iterator[str]:
    for path, kind in row_fields().items():
        value = at(row, path)
        is_missing = value is None and kind.is_null
        if not is_missing and not kind.is_one(value):
            yield f"{path}={value!r}: must be {kind.words}"
        elif kind.items and value:
            yield from _faults_of_items(path, kind, value)
    numbers = [f"{EVAL}.{name}" for name in row[EVAL]]
    numbers += [f"{PLAN}.{name}" for name in row[PLAN] or () if name.endswith(SIZES)]
    for path in numbers:
        if (value := at(row, path)) is not None and not is_number(value):
            yield f"{path}={value!r}: must be {NUMBER.words}"


def _faults_of_items(path: str, kind: Kind, items: list[Mapping[str, Any]]) -> Iterator[str]:
    for item in items:
        if not kind.items.keys() <= item.keys():
            yield f"{path}={item.keys()!r}: must be {kind.words}: {', '.join(kind.items)}"
        for name, inner in kind.items.items():
            if (value := item.get(name)) is not None and not inner.is_one(value):
                yield f"{path}[…].{name}={value!r}: must be {inner.words}"
