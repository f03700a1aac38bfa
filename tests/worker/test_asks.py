"""What a process is asked besides running a point."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lowvram.config.errors import BadInput
from lowvram.knobs.sharding import FSDP, Unsharded
from lowvram.worker import asks
from lowvram.worker.asks import cards_side_by_side


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
