"""The row follows from the specification and the events: whoever has both has the same row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowvram.launch.events import FILE_NAME
from lowvram.launch.spec import FILE_NAME as SPEC
from lowvram.launch.spec import PointSpec
from lowvram.results import row as rows
from lowvram.runs.row_so_far import RowSoFar
from tests.calls import TINY, Outcome, history

Call = Callable[..., Outcome]
OF_ONE_RANK = {"status": "oom", "reason": "out of memory in the update", "memory": {"peak_bytes": 3}}


def so_far(**about: Any) -> RowSoFar:
    config = {"vram": None, "accum": {"parts": 1}, "train": {"batch_size": 4}}
    return RowSoFar(PointSpec("0" * 16, "n", 0, Path(), config, {"mode": "train"}, **about))


def test_a_run_s_own_process_writes_its_row(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent, which runs here, needn't."""
    monkeypatch.setattr(rows, "write", None)
    outcome = call(*TINY, "train.steps=2")
    assert outcome.code == 0, outcome.said()
    assert outcome.row["status"] == "ok"


def test_the_files_of_a_run_give_its_row(call: Call) -> None:
    folder = call(*TINY, "train.steps=2", "plan.skip=true").folder
    found = RowSoFar(PointSpec.read(folder))
    for line in filter(None, (folder / FILE_NAME).read_text().splitlines()):
        event = json.loads(line)
        found.on_event(event.pop("event"), event)
    found.add_reports(0, found.reports)
    found.complete()
    assert rows.parsed(rows.to_json(found.row)) == rows.read(folder)
    assert (found.has_steps, found.has_saved) == (True, True)


def test_a_folder_of_an_earlier_version_has_neither_file(call: Call) -> None:
    outcome = call(*TINY, "train.steps=2")
    for name in (SPEC, FILE_NAME):
        (outcome.folder / name).unlink()
    again = call(f"resume={outcome.folder}", "train.steps=3")
    assert again.code == 0, again.said()
    assert [line["step"] for line in history(again.folder) if "loss/train" in line] == [1, 2, 3]


def test_the_largest_rank_is_the_point_s() -> None:
    found = so_far()
    for rank, peak_bytes in enumerate((5, 9)):
        found.on_event("row", {"rank": rank, "fields": {"status": "ok", "memory": {"peak_bytes": peak_bytes}}})
    found.add_reports(0, {0, 1, 2})
    assert found.row["memory"]["peak_bytes"] == 9
    assert [(rank["rank"], rank["peak_bytes"]) for rank in found.row["ranks"]] == [(0, 5), (1, 9), (2, None)]


def test_what_follows_from_the_rest_is_added_at_the_end() -> None:
    found = so_far(plan={"advice": "try ckpt=every2"})
    found.on_event("row", {"rank": 0, "fields": OF_ONE_RANK})
    found.add_reports(0, found.reports)
    found.complete("process=inline: it is so")
    assert found.row["reason"] == "out of memory in the update; try ckpt=every2"
    assert found.row["disturbed"] == "process=inline: it is so"


def test_a_run_that_is_refused_after_a_step_has_failed() -> None:
    found = so_far()
    found.on_event("metrics", {"step": 1, "values": {}, "is_late": False})
    found.on_event("row", {"rank": 0, "fields": {"status": "incompatible", "reason": "no"}})
    found.add_reports(0, found.reports)
    found.complete()
    assert found.row["status"] == "error"
