"""The settings that differ between rows: options of groups, and values under dotted keys. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lowvram.config.not_identity import NOT_IDENTITY
from lowvram.results.row import Row
from lowvram.results.shown import shown


def varying_names(rows: Sequence[Row]) -> list[str]:
    """The groups and dotted keys of what differs between rows: groups first, each in the order of the rows."""
    flat = flat_settings(rows)
    names = dict.fromkeys(name for row in rows for name in row["choices"]) | dict.fromkeys(
        name for each in flat for name in each
    )
    return [name for name in names if is_setting(name) and _varies(name, rows, flat)]


def flat_settings(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Of each row the values of its configuration by their dotted keys, and the options by their groups."""
    return [{**dict(leaves(row["config"])), **row["choices"]} for row in rows]


def leaves(node: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a nested mapping, with their dotted keys."""
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def is_setting(name: str) -> bool:
    """Whether a group or a dotted key can change a result."""
    parents = {name, name.partition(".")[0]}
    return parents.isdisjoint(NOT_IDENTITY) and not name.endswith("._target_") and name not in NOT_IDENTITY


def _varies(name: str, rows: Sequence[Row], flat: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a group differs between rows, or a key between rows that chose the same option of its group."""
    group, dot, _ = name.partition(".")
    values_by_option: dict[str | None, set[str]] = {}
    for row, each in zip(rows, flat, strict=True):
        if name in each:
            values_by_option.setdefault(row["choices"].get(group) if dot else None, set()).add(value_text(each[name]))
    return any(len(values) > 1 for values in values_by_option.values())


def value_text(value: Any) -> str:
    """A setting's value as it would be typed."""
    return shown(value) if isinstance(value, str) else "null" if value is None else str(value).lower()
