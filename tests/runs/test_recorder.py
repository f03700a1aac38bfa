"""What is left of a run that nobody wanted."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from lowvram.launch.client import Ending, Event
from lowvram.launch.spec import Point
from lowvram.results import row as rows
from lowvram.results.terminal import QuietProgress
from lowvram.runs.run import run_point
from tests.runs.test_remeasure import CONFIG

REFUSED = {"status": "incompatible", "reason": "sharding=none needs that the point has one rank: it has 2"}
STOPPED = {"status": "interrupted", "reason": "stopped in the set-up"}


@final
class TwoRanks:
    """A server whose first rank is asked to stop, and writes its row, as the second one has been refused."""

    disturbs, is_fresh = None, True

    def wait_until_ready(self, order: Any) -> None: ...

    def run(self, point: Point, on_event: Callable[[Event], None], order: Any) -> list[Ending]:
        rows.write(point.folder, rows.merge(point.first_row(), STOPPED))
        on_event({"event": "row", "rank": 1, "fields": REFUSED})
        on_event({"event": "row", "rank": 0, "fields": STOPPED})
        ended = {"is_stopped": False}
        return [
            {"rank": 1, "status": 3 << 8, "ended_by": None, **ended},
            {"rank": 0, "status": 130 << 8, "ended_by": "term", **ended},
        ]


def test_a_refused_run_leaves_no_row_of_another_rank(tmp_path: Path) -> None:
    config, choices = {**CONFIG, "measure": {"reruns": 0, "fidelity": False}}, {"mode": "train"}
    point = Point("id", "name", 0, tmp_path, config, choices, provenance={})
    server: Any = TwoRanks()
    row = run_point(point, server, QuietProgress(io.StringIO()), lambda: 0, lambda each: each)
    assert (row["status"], row["reason"]) == ("incompatible", REFUSED["reason"])
    assert not (tmp_path / rows.FILE_NAME).exists()
