"""The report's colours can be told apart, by colour-blind people too, on a light ground and on a dark one.

Distances are those of CIE Lab; how colours look to the colour-blind is simulated as by Machado, Oliveira and Fernandes
(2009), at full severity.
"""

from __future__ import annotations

import math
import re
from itertools import combinations

import pytest

from lowvram.results.report import figures
from lowvram.results.report.report import PAGE
from lowvram.results.row import KINDS

Triple = tuple[float, ...]
VISIONS: dict[str, tuple[Triple, Triple, Triple]] = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.1523, 1.0526, -0.2049), (0.1145, 0.7863, 0.0992), (-0.0039, -0.0481, 1.052)),
    "deuteranopia": ((0.3673, 0.8606, -0.228), (0.2801, 0.6725, 0.0474), (-0.0118, 0.0429, 0.9688)),
    "tritanopia": ((1.2555, -0.0767, -0.1788), (-0.0784, 0.9308, 0.1476), (0.0047, 0.6914, 0.3039)),
}
LEAST_OF_KINDS, LEAST_OF_CURVES = 30, 20  # adjacent areas; lines, which differ in their dashes too
LIGHT, DARK = (
    dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", part))
    for part in (PAGE / "report.css").read_text().split("@media (prefers-color-scheme: dark)")[:2]
)


def linear(colour: str) -> Triple:
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return tuple(part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)


def lab(colour: str, vision: str) -> Triple:
    red, green, blue = (
        min(1.0, max(0.0, sum(a * b for a, b in zip(line, linear(colour), strict=True)))) for line in VISIONS[vision]
    )
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    x, y, z = (each ** (1 / 3) if each > 0.008856 else 7.787 * each + 16 / 116 for each in (x, y, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def closest(colours: list[str], vision: str) -> float:
    return min(math.dist(lab(a, vision), lab(b, vision)) for a, b in combinations(colours, 2))


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_kinds_and_curves_can_be_told_apart(theme: dict[str, str], vision: str) -> None:
    assert closest([theme[kind] for kind in KINDS if kind != "host"], vision) >= LEAST_OF_KINDS
    assert closest([theme[f"curve-{n}"] for n in range(8)], vision) >= LEAST_OF_CURVES


def test_figures_for_papers_have_the_colours_of_the_page() -> None:
    assert {kind: LIGHT[kind] for kind in figures.KIND_COLOURS} == figures.KIND_COLOURS
    assert [LIGHT[f"curve-{n}"] for n in range(8)] == list(figures.CURVE_COLOURS)
