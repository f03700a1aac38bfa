"""The table of a sweep while it runs: never after each of many points."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowvram.results import table
from lowvram.results.live_table import REST, LiveTable


def test_it_takes_a_twentieth_of_the_time_however_long_the_sweep(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A table takes a millisecond more with each point: after 2,000 points of 0.2 s that would be twice their time."""
    now, in_tables, num_rows = 0.0, 0.0, 0

    def save(*_: object) -> None:
        nonlocal now, in_tables
        now += 1e-3 * num_rows
        in_tables += 1e-3 * num_rows

    monkeypatch.setattr(table, "save", save)
    live = LiveTable(lambda: now)
    for _ in range(2000):
        num_rows += 1
        now += 0.2
        live.save(tmp_path)
    assert 0 < in_tables <= now / REST


def test_between_long_points_it_is_always_up_to_date(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now, saved = 0.0, 0

    def save(*_: object) -> None:
        nonlocal now, saved
        now, saved = now + 1.0, saved + 1

    monkeypatch.setattr(table, "save", save)
    live = LiveTable(lambda: now)
    for _ in range(5):
        now += 60.0
        live.save(tmp_path)
    assert saved == 5


def test_a_full_disk_ends_no_sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def save(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(table, "save", save)
    LiveTable().save(tmp_path)
