"""What a report is about: the settings that were swept, when, and the command. Needs no torch."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from lowvram.results.row import Row
from lowvram.results.shown import shown

MOST_NAMES, MOST_VALUES, MOST_CHARACTERS = 4, 5, 40  # of the settings in a title, of the values of each


def title(differing: Sequence[Mapping[str, str]]) -> str:
    """The swept settings with their values; "" if nothing differs."""
    names = list(dict.fromkeys(name for each in differing for name in each))
    parts = [_with_values(name, [each[name] for each in differing if name in each]) for name in names[:MOST_NAMES]]
    rest = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return " × ".join([*parts, *rest])


def _with_values(name: str, values: Sequence[str]) -> str:
    unique = list(dict.fromkeys(values))
    text = ", ".join(unique)
    is_short = len(unique) <= MOST_VALUES and len(text) <= MOST_CHARACTERS
    return f"{name} {text}" if is_short else f"{name} ({len(unique)} values)"


def date(rows: Sequence[Row]) -> str:
    """When the first point was started, and the last one if that was on another day; "" if the rows don't say it."""
    times = sorted(row["provenance"]["started"] for row in rows if row["provenance"]["started"])
    if not times:
        return ""
    first, last = (shown(time[:16].replace("T", " ")) for time in (times[0], times[-1]))
    return f"{first} UTC" if first[:10] == last[:10] else f"{first} to {last} UTC"


def command(rows: Sequence[Row]) -> str:
    """The command of a sweep, made of those of its points: a word that differs between them has all its values. That is
    what was typed, unless it listed the points one by one. "" if no row says its command, or if they are commands of
    different programs."""
    commands = list(dict.fromkeys(text for row in rows if (text := row["provenance"]["command"])))
    if len(commands) < 2:
        return shown(commands[0]) if commands else ""
    values: dict[str, dict[str, None]] = {}
    for word in (word for text in commands for word in _words(text)):
        key, equals, value = word.partition("=")
        values.setdefault(key + equals, {})[value] = None
    if len({tuple(word for word in _words(text) if "=" not in word) for text in commands}) > 1:
        return ""
    words = [f"{key}{','.join(each)}" for key, each in values.items()]
    first = next((i for i, word in enumerate(words) if "=" in word), len(words))
    return shown(shlex.join([*words[:first], "-m", *words[first:]]))


def _words(text: str) -> list[str]:
    """The words of a command; somebody may have edited it so that no shell can read it."""
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()
