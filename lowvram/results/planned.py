"""A plan in words, for the end of a single run. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowvram.results.row import size_text

NUM_LARGEST = 3
LEAST_SHARE = 0.01  # of a step's time: smaller parts are left out
WORK = {"copies": "copies", "host": "the host's work"}  # beside the device's computation
Plan = Mapping[str, Any]


def plan_lines(plan: Plan | None) -> list[str]:
    """The planned sizes, whether they fit, what they are made of, and what the plan doesn't know."""
    if plan is None:
        return []
    if plan.get("allocated_bytes") is None:
        return [plan["reason"]] if plan.get("reason") else []
    return [
        line
        for line in (
            _sizes(plan),
            _verdict(plan),
            _ranges(plan),
            _host(plan),
            _time(plan),
            _cost(plan),
            _hidden(plan),
            _wire(plan),
            _kinds(plan),
            _largest(plan),
            _unknown(plan),
            _error(plan),
        )
        if line
    ]


def _sizes(plan: Plan) -> str:
    sizes = {"allocated": "allocated_bytes", "reserved": "reserved_bytes", "on the host": "host_bytes"}
    texts = [f"{size_text(plan[name])} {what}" for what, name in sizes.items() if plan.get(name)]
    target = f" for {plan['device']}" if plan.get("device") else ""
    target += f", of a {plan['loop']} loop" if plan.get("loop") else ""
    return f"plan{target}: {', '.join(texts)}{', as if not compiled' if plan.get('is_eager_equivalent') else ''}"


def _verdict(plan: Plan) -> str | None:
    least, budget = plan.get("least_vram_bytes"), plan.get("budget_bytes")
    if least is None:
        return None
    needs = f"needs at least {size_text(least)}"
    if plan.get("fits") is None or budget is None:
        return needs
    fits = "fits" if least * (1 + plan["margin"]) <= budget else "does not fit"
    advice = f"; {plan['advice']}" if plan.get("advice") and not plan["fits"] else ""
    return f"{fits} into {size_text(budget)}: {needs} plus a margin of {plan['margin']:.0%}{advice}"


def _ranges(plan: Plan) -> str | None:
    texts = [
        f"{line['name']}, {size_text(line['least_bytes'])} to {size_text(line['bytes'])}"
        for line in plan.get("lines", [])
        if line.get("least_bytes") is not None
    ]
    return f"counted with its most: {'; '.join(texts)}" if texts else None


def _host(plan: Plan) -> str | None:
    """A line only if the plan doesn't fit into the host's memory."""
    needed, budget = plan.get("host_bytes"), plan.get("host_budget_bytes")
    if not needed or not budget or needed * (1 + plan["margin"]) <= budget:
        return None
    return (
        f"does not fit into the host's memory: needs {size_text(needed)} of the {size_text(budget)} allowed (plan.host)"
    )


def _time(plan: Plan) -> str | None:
    if plan.get("step_ms") is None:
        return None
    of = sorted(plan.get("step_ms_of", {}).items(), key=lambda item: -item[1])
    shares = [f"{name} {ms / plan['step_ms']:.0%}" for name, ms in of if ms >= LEAST_SHARE * plan["step_ms"]]
    return f"about {ms_text(plan['step_ms'])} ms a step ({plan['step_ms_source']}): {', '.join(shares)}"


def _cost(plan: Plan) -> str | None:
    if plan.get("cost") is None:
        return None
    return f"about {plan['cost']:.4g} for {plan['num_steps']:,} updates at the price per hour that was typed"


def _hidden(plan: Plan) -> str | None:
    """How much of what runs beside the computation the device doesn't wait for."""
    texts = [
        f"{ms_text(ms - plan['step_ms_of'].get(name, 0.0))} of {ms_text(ms)} ms of {WORK[name]}"
        for name, ms in (plan.get("beside_ms_of") or {}).items()
        if ms >= LEAST_SHARE * plan["step_ms"]
    ]
    return f"hidden behind the computation: {', '.join(texts)}" if texts else None


def _wire(plan: Plan) -> str | None:
    if not plan.get("wire_bytes"):
        return None
    time = "" if plan["wire_ms"] is None else f", at least {ms_text(plan['wire_ms'])} ms of its link"
    return f"each rank sends {size_text(plan['wire_bytes'])} a step to others{time}"


def ms_text(milliseconds: float) -> str:
    """Three digits: a plan is no more accurate."""
    return f"{float(f'{milliseconds:.3g}'):g}"


def _kinds(plan: Plan) -> str | None:
    kinds = sorted(plan.get("by_kind", {}).items(), key=lambda item: -item[1])
    texts = [f"{kind} {size_text(num_bytes)}" for kind, num_bytes in kinds if num_bytes and kind != "host"]
    return f"at the peak: {', '.join(texts)}" if texts else None


def _largest(plan: Plan) -> str | None:
    texts = [f"{size_text(tensor['bytes'])} {tensor['name']}" for tensor in plan.get("largest", [])[:NUM_LARGEST]]
    return f"largest: {', '.join(texts)}" if texts else None


def _error(plan: Plan) -> str | None:
    if "error" not in plan:
        return None
    if plan["error"] is None:
        return "how far plans for this device are off has not been measured yet"
    error = plan["error"]
    return f"plans were off by {error['median']:.1%} (median) and {error['p95']:.1%} (p95): {error['where']}"


def _unknown(plan: Plan) -> str | None:
    names = [line["name"] for line in plan.get("lines", []) if line["bytes"] is None]
    return f"not known, so not counted: {', '.join(names)}" if names else None
