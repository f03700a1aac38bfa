"""The tables of scripts/benchmarks/bench_knobs.py, out of the lines that it has kept."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lowvram.config.registry import Option, all_options, knob_of
from lowvram.results.row import MIB, Status

HEAD = """| option | peak | saves | other | process growth | time | gradient error |
|---|---:|---|---:|---:|---:|---:|"""
Line = Mapping[str, Any]  # of one option in one round, or the error of its gradients


def table(lines: Sequence[Line]) -> Iterator[str]:
    """Of one model: a row for the baseline, then one for each option; below it the machine."""
    seen: dict[str, list[Line]] = {}
    for line in lines:
        if "found" in line:
            seen.setdefault(line["option"], []).append(line)
    errors = {line["option"]: line["gradient_error"] for line in lines if "gradient_error" in line}
    names = [(option, name) for option in all_options() for name in seen if name.split()[0] == "=".join(option)]
    yield HEAD
    if names:
        yield baseline(seen[names[0][1]][-1]["plain"][0], error_text(errors.get("")))
    for option, name in names:
        yield row(option, seen[name], error_text(errors.get(name)))
    yield ""
    ran = [line for each in seen.values() for line in each if line["found"]["status"] == Status.OK]
    yield f"({'; '.join(dict.fromkeys(map(machine, ran)))}; {rounds(seen)}.)"


def baseline(found: Line, error: str) -> str:
    growth = f"{found['process_peak_bytes'] / MIB:.1f}"
    return f"| baseline | {found['peak_bytes'] / MIB:.1f} | | {other(found)} | {growth} | 1 | {error} |"


def row(option: Option, seen: Sequence[Line], error: str) -> str:
    last, name = seen[-1], seen[-1]["words"]
    if last["found"]["status"] != Status.OK:
        return f"| `{name}` | {last['found']['status']}: {last['found']['reason']} |"
    return f"| `{name}` | {memory(option, last['found'], last['plain'][0])} | {time(seen)} | {error} |"


def memory(option: Option, found: Line, plain: Line) -> str:
    """Peak; the kind that the option saves; other's share of the peak; growth of the process."""
    growth = ratio(found, plain, "process_peak_bytes")
    if found["by_kind_max"] is None:
        return f"– | – | – | {growth}"
    kind = knob_of(option).saves
    saved = f"{kind.value} {of_kind(plain, kind.value)} → {of_kind(found, kind.value)}" if kind else "–"
    return f"{ratio(found, plain, 'peak_bytes')} | {saved} | {other(found)} | {growth}"


def time(seen: Sequence[Line]) -> str:
    """The step's, over the mean of the baselines before and after it: median and range over rounds with times."""
    ratios = [
        line["found"]["step_ms"] / statistics.mean(plain["step_ms"] for plain in line["plain"])
        for line in seen
        if line["found"]["status"] == Status.OK and line["found"]["step_ms"] is not None
    ]
    if not ratios:
        return "–"
    spread = f" ({min(ratios):.2f}–{max(ratios):.2f})" if len(ratios) > 1 else ""
    return f"{statistics.median(ratios):.2f}{spread}"


def of_kind(found: Line, kind: str) -> str:
    return f"{found['by_kind_max'][kind] / MIB:.1f}"


def other(found: Line) -> str:
    return f"{found['by_kind']['other'] / found['peak_bytes']:.1%}"


def ratio(found: Line, plain: Line, name: str) -> str:
    here, there = found[name], plain[name]
    change = f"{here / there - 1:+.0%}".replace("-", "−")
    return f"{there / MIB:.1f} → {here / MIB:.1f} ({change})"


def error_text(error: float | None) -> str:
    return "–" if error is None else f"{error:.1e}"


def machine(line: Line) -> str:
    about = line["machine"]
    return f"{about['device_name']}, torch {about['torch']}, {about['threads']} thread{'s' * (about['threads'] != 1)}"


def rounds(seen: Mapping[str, Sequence[Line]]) -> str:
    counts = sorted({len(lines) for lines in seen.values()})
    return (
        f"{' to '.join(map(str, [counts[0], *counts[1:][-1:]]))} round{'s' * (counts[-1] != 1)}" if counts else "none"
    )
