"""The figures of a report as PNGs, for papers and for W&B. Needs matplotlib, which nothing else imports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowvram.config.errors import Refused
from lowvram.results.metrics import number_texts
from lowvram.results.report.data import Evidence

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_INCHES, HEIGHT_INCHES, ROW_INCHES = 6.4, 4.2, 0.28
DOTS_PER_INCH = 200
MOST_NAMED = 12  # curves that a legend can name
LOG_FROM = 12  # ratio of the largest to the smallest peak above which an axis is logarithmic
# Colours that colour-blind people can tell apart, as in page/report.css.
GOOD, BAD, GREY, DIM = "#0063a0", "#b54800", "#8a8f96", "#55595f"
KIND_COLOURS = {
    "parameters": "#2b68f0",
    "gradients": "#ad1208",
    "optimizer": "#29d787",
    "activations": "#e3bc18",
    "inputs": "#eb52af",
    "other": "#2e3139",
}
CURVE_COLOURS = ("#1b04f8", "#fe5301", "#1cae77", "#d46cd4", "#7f1f01", "#00615c", "#590f94", "#151c48")
DASHES = ("-", "--", ":", "-.")
DISTURBED = "≈ disturbed: its speed is uncertain"
Draw = Callable[["Axes", Evidence], None]


def save_figures(folder: Path, shown: Evidence) -> list[Path]:
    """Writes a PNG of each figure that the evidence has data for; returns their paths.

    Raises:
        Refused: matplotlib isn't installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise Refused("PNGs need matplotlib, which isn't installed: pip install 'lowvram[report]'") from None
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, (draw, num_rows) in _wanted(shown).items():
        height = max(HEIGHT_INCHES, ROW_INCHES * num_rows + 1.2)
        figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DOTS_PER_INCH, layout="constrained")
        draw(figure.add_subplot(), shown)
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1])
    return paths


def _wanted(shown: Evidence) -> dict[str, tuple[Draw, int]]:
    """Name -> the function that draws it, and its number of rows."""
    points = shown["points"]
    figures: dict[str, tuple[Draw, int]] = {}
    if any(point["memory"] and point["speed"] for point in points):
        figures["memory_and_speed"] = (_scatter, 0)
    if shown["effects"]:
        figures["choices"] = (_effects, len(shown["effects"]))
    if shown["waterfall"] and any(point["memory"] for point in points):
        figures["waterfall"] = (_waterfall, len(shown["waterfall"]))
    if any(point["by_kind"] and point["memory"] for point in points):
        figures["kinds"] = (_kinds, sum(bool(point["by_kind"] and point["memory"]) for point in points))
    for field in ("seconds", "seen"):
        if any(point["curve"][field] for point in points):
            figures[f"loss_over_{'time' if field == 'seconds' else shown['speed_unit']}"] = (_losses(field), 0)
    return figures


def _memory(shown: Evidence) -> str:
    source = f" ({shown['memory_source']})" if shown["memory_source"] else ""
    return f"{shown['memory_title']}, {shown['unit']}{source}"


def _plain(text: str) -> str:
    """The text, escaped so that matplotlib doesn't read it as a formula."""
    return text.replace("$", r"\$")


def _scatter(axes: Axes, shown: Evidence) -> None:
    points = [(i, point) for i, point in enumerate(shown["points"]) if point["memory"] and point["speed"]]
    errors = [point["gradient_error"] for _, point in points]
    at = [point["memory"] for _, point in points], [point["speed"] for _, point in points]
    if any(error is not None for error in errors):
        colours = [float("nan") if error is None else max(error, 1e-8) for error in errors]
        dots = axes.scatter(*at, c=colours, cmap="cividis", norm="log", edgecolors=GREY, plotnonfinite=True, zorder=3)
        axes.get_figure().colorbar(dots, label="error of the gradient")  # pyright: ignore[reportOptionalMemberAccess]
    else:
        axes.scatter(*at, c=[GOOD if i in shown["frontier"] else GREY for i, _ in points], zorder=3)
    _speed_ranges(axes, [point for _, point in points])
    edge = [shown["points"][i] for i in shown["frontier"]]
    axes.plot([point["memory"] for point in edge], [point["speed"] for point in edge], "--", color=GOOD, linewidth=1)
    named = edge if len(edge) <= MOST_NAMED else [edge[0], edge[-1]]
    middle = sum(axes.get_xlim()) / 2
    for number, point in enumerate(named):
        offset, side = (4, -13 if number % 2 else 7), "left" if point["memory"] < middle else "right"
        words, place = _plain(point["name"]), (point["memory"], point["speed"])
        axes.annotate(words, place, offset, textcoords="offset points", fontsize=7, ha=side)
    axes.set(xlabel=_memory(shown), ylabel=f"{shown['speed_unit']}/s")
    axes.set_ylim(0, 1.08 * max(at[1]))
    if max(at[0]) > LOG_FROM * min(at[0]):
        _log_axis(axes)
    axes.grid(alpha=0.3)


def _speed_ranges(axes: Axes, points: Sequence[dict[str, Any]]) -> None:
    """The 5th to the 95th percentile of the speed of steps, as bars, and a white spot on disturbed points."""
    for point in (point for point in points if point["speed_range"]):
        axes.plot([point["memory"]] * 2, point["speed_range"], "_-", color=GREY, linewidth=1, zorder=2)
    disturbed = [(point["memory"], point["speed"]) for point in points if point["disturbed"]]
    if disturbed:
        axes.scatter(*zip(*disturbed, strict=True), s=9, color="white", zorder=4, label=DISTURBED)
        axes.plot([], [], "o", color=GREY, markerfacecolor="white", label=DISTURBED)
        axes.legend(handles=axes.get_legend_handles_labels()[0][-1:], fontsize=7, loc="lower right")


def _log_axis(axes: Axes) -> None:
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _effects(axes: Axes, shown: Evidence) -> None:
    effects = sorted(shown["effects"], key=lambda effect: -(effect["memory_ratio"] or 1))
    for shift, key, label, colour in ((0.2, "memory_ratio", "memory", GOOD), (-0.2, "speed_ratio", "speed", "#e69f00")):
        places = [i + shift for i in range(len(effects))]
        changes = [100 * ((effect[key] or 1) - 1) for effect in effects]
        axes.barh(places, changes, 0.38, label=label, color=colour)
    names = [_plain(f"{effect['name']}={effect['value']}") for effect in effects]
    axes.set_yticks(range(len(effects)), names)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel("change, % (median over pairs that differ in nothing else)")
    axes.legend()


def _waterfall(axes: Axes, shown: Evidence) -> None:
    peaks = [shown["points"][step["point"]]["memory"] for step in shown["waterfall"]]
    known = [peak for peak in peaks if peak is not None]
    least, most = 0.7 * min(known), max(known)
    labels, before = [], None
    for row, (step, peak) in enumerate(zip(shown["waterfall"], peaks, strict=True)):
        status = shown["points"][step["point"]]["status"]
        name = "+ " + " ".join(step["added"]) if row else "baseline"
        labels.append(_plain(name if status == "ok" else f"{name} ({status})"))
        if peak is None or status != "ok":
            continue
        start = peak if before is None else before
        colour = GREY if step["is_accumulation"] else GOOD if start >= peak else BAD
        axes.barh(row, min(start, peak) - least, left=least, color=GOOD, alpha=0.25)
        axes.barh(row, abs(start - peak), left=min(start, peak), color=colour)
        words = f"{peak:.3g} {shown['unit']}" + (f": {known[0] / peak:.3g} × less" if row else "")
        axes.text(1.12 * most, row, words, va="bottom", fontsize=8)
        axes.text(1.12 * most, row, _pace(shown, step["point"]), va="top", fontsize=7, color=DIM)
        before = peak
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel(f"{_memory(shown)}, log scale\ngrey: plain accumulation; ≈: disturbed")
    _log_axis(axes)
    axes.set_xlim(least, most * (most / least) ** 0.55)


def _pace(shown: Evidence, index: int) -> str:
    """The speed of a point of the waterfall, beside that of its first."""
    speed, first = shown["points"][index]["speed"], shown["points"][shown["waterfall"][0]["point"]]["speed"]
    if not (speed and first):
        return ""
    compared = [shown["points"][i] for i in (index, shown["waterfall"][0]["point"])]
    sign = "≈ " if any(point["disturbed"] for point in compared) else ""
    if index == shown["waterfall"][0]["point"]:
        return f"{sign}{number_texts([speed], num_digits=3)[0]} {shown['speed_unit']}/s"
    return f"{sign}{speed / first:.2g} × the speed"


def _kinds(axes: Axes, shown: Evidence) -> None:
    points = sorted(
        (point for point in shown["points"] if point["by_kind"] and point["memory"]), key=lambda point: point["memory"]
    )
    left = [0.0] * len(points)
    for k, kind in enumerate(shown["kinds"]):
        sizes = [point["by_kind"][k] for point in points]
        if any(sizes):
            axes.barh(range(len(points)), sizes, left=left, label=kind, color=KIND_COLOURS[kind])
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    rests = [max(0.0, point["memory"] - start) for point, start in zip(points, left, strict=True)]
    if any(rest > 0.005 * point["memory"] for point, rest in zip(points, rests, strict=True)):
        axes.barh(range(len(points)), rests, left=left, label="kind unknown", color=GREY, alpha=0.45)
    planned = [(point["planned"], row) for row, point in enumerate(points) if point["planned"] is not None]
    if planned:
        axes.plot(*zip(*planned, strict=True), "|", color="black", markersize=10, label="planned")
    axes.set_yticks(range(len(points)), [_plain(point["name"]) for point in points], fontsize=7)
    axes.set_xlabel(_memory(shown))
    axes.legend(fontsize=8)


def _losses(field: str) -> Draw:
    def draw(axes: Axes, shown: Evidence) -> None:
        points: list[dict[str, Any]] = [point for point in shown["points"] if point["curve"][field]]
        for n, point in enumerate(points):
            label = _plain(point["name"]) if len(points) <= MOST_NAMED else None
            (line,) = axes.plot(point["curve"][field], point["curve"]["loss"], linewidth=1.2, label=label)
            line.set_color(CURVE_COLOURS[n % len(CURVE_COLOURS)])
            line.set_linestyle(DASHES[(n + n // len(CURVE_COLOURS)) % len(DASHES)])
        axes.set(
            xlabel="time of steps, s" if field == "seconds" else f"{shown['speed_unit']} seen", ylabel="training loss"
        )
        axes.grid(alpha=0.3)
        if len(points) <= MOST_NAMED:
            axes.legend(fontsize=7)

    return draw
