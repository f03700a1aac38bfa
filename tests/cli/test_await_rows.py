"""Rows of points that a launcher has run on other machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowvram.cli.call import await_rows
from lowvram.cli.job import Ending
from lowvram.results import row as rows
from lowvram.results.files import late


def test_the_rows_of_jobs_on_other_machines_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = [Ending(index, tmp_path / str(index)) for index in range(2)]
    without = [Ending(2, tmp_path / "2", is_stopped=True), Ending(3, tmp_path / "3", row=rows.empty_row())]

    def see(_: Path) -> bool:
        for ending in ended:
            ending.folder.mkdir(exist_ok=True)
            rows.write(ending.folder, rows.empty_row())
        return True

    monkeypatch.setattr(late, "is_shared", see)
    await_rows([*ended, *without])
    assert all(ending.read_row() is not None for ending in ended)
    assert without[0].read_row() is None
