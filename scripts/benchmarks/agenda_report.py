"""The page about what `scripts/gpu_check agenda` measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from lowvram.results import table
from lowvram.results.row import GIB, MIB, Status
from scripts.benchmarks.agenda_items import Kind
from scripts.benchmarks.book import Line

POINT_HEADINGS = (
    "point",
    "peak GiB",
    "reserved",
    "planned",
    "planned reserved",
    "host",
    "ms a step",
    "p05-p95",
    "planned ms",
)


def report(lines: Sequence[Line]) -> Iterator[str]:
    """Markdown: a section for each item."""
    first = lines[0]
    yield f"# The agenda on {first['device']}\n"
    yield "`scripts/gpu_check agenda`, then `scripts/gpu_check agenda keep`. Each point is a process of its own, and"
    yield "nothing else ran beside it. Figures: [agenda.jsonl](agenda.jsonl), whose lines name the commit and the time."
    for line in lines:
        cut = f"; cut off after {line['seconds']:.0f} s" if line["is_cut"] else ""
        yield f"\n## {line['about']}{cut}\n"
        yield from SECTIONS[Kind(line["kind"])](line["found"])


def points(rows: Sequence[Line]) -> Iterator[str]:
    yield from heading(POINT_HEADINGS)
    for row in rows:
        memory, plan, times = row["memory"], row["plan"] or {}, row["time"]
        if row["status"] != Status.OK:
            yield f"| {table.label(row)} | {row['status']}: {row['reason']} |" + " |" * (len(POINT_HEADINGS) - 2)
            continue
        host_bytes = (memory["by_kind_max"] or {}).get("host") or 0
        spread = "-".join(number(times[name], 0) for name in ("step_ms_p05", "step_ms_p95"))
        cells = [
            *(size(memory[name]) for name in ("peak_bytes", "reserved_bytes")),
            *(size(plan.get(name)) for name in ("allocated_bytes", "reserved_bytes")),
            *(
                size(host_bytes if host_bytes >= MIB else None),
                number(times["step_ms_p50"], 0),
                spread,
                number(plan.get("step_ms"), 0),
            ),
        ]
        yield f"| {' | '.join([table.label(row), *cells])} |"


def probe(found: Sequence[Line]) -> Iterator[str]:
    keys = list(dict.fromkeys(key for line in found for key in line))
    yield from heading(keys)
    for line in found:
        yield f"| {' | '.join(cell(line.get(key)) for key in keys)} |"


def tests(found: Sequence[Line]) -> Iterator[str]:
    counts = Counter(line["outcome"].lower() for line in found)
    yield ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) + "."
    for line in found:
        if line["outcome"] in ("FAILED", "ERROR"):
            yield f"- {line['outcome']}: `{line['test']}`"


def heading(titles: Sequence[str]) -> Iterator[str]:
    yield f"| {' | '.join(titles)} |"
    yield "|---|" + "---:|" * (len(titles) - 1)


def size(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / GIB:.3f}"


def number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def cell(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"


SECTIONS = {Kind.POINTS: points, Kind.PROBE: probe, Kind.TESTS: tests}
