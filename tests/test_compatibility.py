"""The script that tries every pair of options sees what is wrong."""

from __future__ import annotations

import pytest

from lowvram.options import neutral_options
from scripts.compatibility import FLOOR, Tried, fault, tolerance

NEUTRAL = frozenset(neutral_options().items())
BF16 = frozenset({**neutral_options(), "precision": "bf16"}.items())


@pytest.mark.parametrize(
    ("row", "history", "found"),
    [
        (NEUTRAL, [2.0, 1.0], None),
        (NEUTRAL, [2.0, 1.0 + FLOOR / 2], None),
        (NEUTRAL, [2.0, 1.001], "off by 1.0e-03, allowed 1.0e-04"),
        (BF16, [2.0, 1.001], None),
        (BF16, [2.0, 1.5], "off by 5.0e-01, allowed 2.0e-02"),
    ],
)
def test_what_lies_outside_the_bands_is_a_fault(row: frozenset, history: list[float], found: str | None) -> None:
    reference = Tried(NEUTRAL, "transformer", "ok", None, [2.0, 1.0], 0.0)
    assert fault(Tried(row, "transformer", "ok", None, history, 0.0), reference) == found


def test_a_point_that_did_not_end_well_is_a_fault() -> None:
    reference = Tried(NEUTRAL, "transformer", "ok", None, [2.0], 0.0)
    assert fault(Tried(NEUTRAL, "transformer", "error", "why", [], 0.0), reference) == "error: why"


def test_an_optimizer_is_compared_with_itself() -> None:
    assert tolerance(frozenset({**neutral_options(), "optimizer": "sgd"}.items())) == FLOOR
