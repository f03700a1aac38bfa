"""The band of reference losses, and how far from it a history lies."""

from __future__ import annotations

import pytest

from lowvram.fidelity.band import band, loss_gap

REFERENCES = [[4.0, 2.0], [4.4, 2.0], [3.9, 2.0]]


def test_the_band_is_the_mean_and_the_range_around_it() -> None:
    first, second = band(REFERENCES)
    assert first == pytest.approx((4.1 - 0.5, 4.1, 4.1 + 0.5))
    assert second == (2.0, 2.0, 2.0)


@pytest.mark.parametrize("losses", [*REFERENCES, [4.6 - 1e-9, 2.0], [3.6 + 1e-9, 2.0]])
def test_inside_there_is_no_gap(losses: list[float]) -> None:
    assert loss_gap(losses, band(REFERENCES)) == 0


@pytest.mark.parametrize(
    ("losses", "gap"),
    [
        ([4.6 + 0.41, 2.0], 0.1),  # of 4.1
        ([3.6 - 0.41, 2.0], 0.1),  # on either side
        ([4.6 + 0.41, 2.6], 0.3),  # the largest of all steps
        ([4.6 + 0.41, 1.9], 0.1),
    ],
)
def test_the_gap_is_the_largest_distance_outside(losses: list[float], gap: float) -> None:
    assert loss_gap(losses, band(REFERENCES)) == pytest.approx(gap)


def test_histories_of_unequal_length_are_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        loss_gap([1.0], band(REFERENCES))
