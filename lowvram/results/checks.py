"""Finds figures of a row that contradict each other. The parent process checks every row. Needs no torch.

Most errors of measurement become visible in this way, since many figures are measured twice or in two ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lowvram.config.settings import parse_bytes
from lowvram.results.columns import value_at
from lowvram.results.row import Row, size_text

WHOLE_STEP = 0.5  # a step takes at least this share of the sum of its phases, even on a disturbed machine
EXACT = 1.01  # tolerance factor for figures that are counted, not timed
Check = Callable[[Row], str | None]


def failed_checks(row: Row) -> Iterator[str]:
    """A sentence for each contradiction."""
    return filter(None, (check(row) for check in ALL))


def budget(row: Row) -> str | None:
    peak_bytes, vram_bytes = row["memory"]["peak_bytes"], parse_bytes("vram", row["config"].get("vram"))
    is_capped = row["memory"]["source"] != "process"  # its growth includes pages of files, which the cap doesn't limit
    if peak_bytes is None or vram_bytes is None or not is_capped or peak_bytes <= vram_bytes:
        return None
    return f"vram={row['config']['vram']} was not enforced: the peak was {size_text(peak_bytes)}"


def late_reset(row: Row) -> str | None:
    """The peak of a single step, measured afterwards, may exceed that of the whole run by at most one batch."""
    peak_bytes, steady_bytes = row["memory"]["peak_bytes"], row["memory"]["steady_peak_bytes"]
    more_bytes = (value_at(row, "memory.by_kind_max.inputs") or 0) + 2**20
    if peak_bytes is None or steady_bytes is None or steady_bytes <= peak_bytes + more_bytes:
        return None
    return (
        f"the peak was reset too late: one step held {size_text(steady_bytes)}, the whole run {size_text(peak_bytes)}"
    )


def unfinished_steps(row: Row) -> str | None:
    """Steps on a card must take about as long as their phases; if not, the clock didn't wait for the device. Compiled
    steps aren't checked, since the marks between phases may recompile them."""
    if row["memory"]["source"] != "cuda_allocator":
        return None
    step_ms = row["time"]["step_ms_p50"]
    phases = [row["time"][f"{phase}_ms"] for phase in ("forward", "backward", "update")]
    if step_ms is None or None in phases or row["compiled"] or step_ms >= WHOLE_STEP * sum(phases):
        return None
    return f"steps of {step_ms:.4g} ms were not waited for: their phases take {sum(phases):.4g} ms"


def best_of_several(row: Row) -> str | None:
    """Throughput must not be that of the fastest steps: the mean of step times is always at least 95 % of their 5th
    percentile."""
    samples_per_s, fastest_ms = row["throughput"]["samples_per_s"], row["time"]["step_ms_p05"]
    batch_size = value_at(row, "config.train.batch_size")
    if not (samples_per_s and fastest_ms and batch_size) or 1e3 * batch_size / samples_per_s >= 0.94 * fastest_ms:
        return None
    return f"{samples_per_s:.4g} samples/s are more than in the fastest steps, of {fastest_ms:.4g} ms"


def padding(row: Row) -> str | None:
    samples_per_s, tokens_per_s = row["throughput"]["samples_per_s"], row["throughput"]["tokens_per_s"]
    length, share = value_at(row, "config.data.sequence_length"), row["data"]["padding"]
    if not (samples_per_s and tokens_per_s and length) or share is None:
        return None
    data = row["config"]["data"]
    if "target_length" in data:  # a sample may be a pair of texts
        length += data["target_length"] or length
    if tokens_per_s <= EXACT * samples_per_s * length * (1 - share):
        return None
    return f"padding was counted: {tokens_per_s:.4g} tokens/s don't fit into {samples_per_s:.4g} samples/s"


def too_much_arithmetic(row: Row) -> str | None:
    mfu = row["throughput"]["mfu"]
    if mfu is None or mfu <= 1:
        return None
    return f"{mfu:.0%} of the device's peak rate is more than it can do: more than the model's arithmetic was counted"


def eager(row: Row) -> str | None:
    if row["choices"].get("compile") not in ("blocks", "model") or row["compiled"] is not False:
        return None
    return f"compile={row['choices']['compile']} was measured eager"


ALL: tuple[Check, ...] = (budget, late_reset, unfinished_steps, best_of_several, padding, too_much_arithmetic, eager)
