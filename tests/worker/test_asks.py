"""What a process is asked besides running a point."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lowvram.config.errors import BadInput
from lowvram.knobs.sharding import FSDP, Unsharded
from lowvram.worker import asks
from lowvram.worker.asks import cards_side_by_side, fewest_slices
from tests.calls import TINY
from tests.planning.test_worker import composed


def points(*devices: str, sharding: Any = None, num_devices: int | None = None) -> Any:
    groups = {"sharding": sharding or Unsharded()}
    roots = [SimpleNamespace(device=device, devices=num_devices) for device in devices]
    return [SimpleNamespace(root=root, groups=groups) for root in roots]


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asks, "visible_cards", lambda device: [] if device == "cpu" else ["0", "1"])


@pytest.mark.usefixtures("two_cards")
def test_points_side_by_side_share_cards_that_all_may_take() -> None:
    assert cards_side_by_side(points("auto", "auto"), "auto") == ["0", "1"]
    assert cards_side_by_side(points("cpu", sharding=FSDP()), "2") == []


@pytest.mark.usefixtures("two_cards")
def test_points_that_no_single_card_fits_are_refused_at_once() -> None:
    for devices in (("cpu", "cuda"), ("cuda", "cuda:1")):
        named = f"jobs='2': must be 1 where points name different devices \\({', '.join(devices)}\\)"
        with pytest.raises(BadInput, match=named):
            cards_side_by_side(points(*devices), "2")
    with pytest.raises(BadInput, match="jobs='auto': must be 1 where points have several ranks"):
        cards_side_by_side(points("auto", sharding=FSDP()), "auto")
    with pytest.raises(BadInput, match="jobs='2': must be 1 where points have several ranks"):
        cards_side_by_side(points("auto", num_devices=2), "2")


@pytest.mark.parametrize(
    ("words", "num_slices"),
    [
        (("devices=4", "mode=search"), 1),
        (("devices=4", "mode=search", "sharding=ddp"), 1),
        (("mode=search", "sharding=ddp", "sharding.ranks=4"), 4),
        (("devices=4", "sharding=ddp"), 4),
        (("devices=4", "sharding=tensor", "sharding.tensor=2"), 2),
        (("devices=4",), 1),
    ],
)
def test_a_batch_is_held_to_the_slices_that_it_surely_has(words: tuple[str, ...], num_slices: int) -> None:
    """Of the meshes of a search some have one row. Several devices without `sharding` are refused for that alone."""
    whole, _ = composed(*TINY, *words)
    assert fewest_slices(whole) == num_slices
