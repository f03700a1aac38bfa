"""The row of a run, from its specification and the events of its ranks. Imports no torch.

The first rank keeps it and writes it when the run ends. Whoever follows the run reads the same events, and so has the
same row: it is written there only if the first rank died without one, or another rank is to blame.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, final

from lowvram.config.secret import without_secrets
from lowvram.launch.outcome import RankReport
from lowvram.launch.spec import PointSpec, with_parts
from lowvram.results import row as rows
from lowvram.results.checks import failed_checks
from lowvram.results.row import Status

OF_A_RANK = ("peak_bytes", "reserved_bytes", "process_peak_bytes", "host_peak_bytes")  # listed for each rank


@final
class RowSoFar:
    """What is known of a run.

    Attributes:
        row: its row.
        reports: how its ranks ended, by rank.
        more_parts: for the next attempt, if this one runs out of memory; None: there can be none.
        has_steps: whether a step was logged.
        has_saved: whether a step was saved.
    """

    def __init__(self, spec: PointSpec) -> None:
        self.spec, self.row = spec, spec.first_row()
        self.reports: dict[int, RankReport] = {}
        self.more_parts: int | None = None
        self.has_steps = self.has_saved = False

    def add(self, fields: Mapping[str, Any]) -> None:
        """Merge fields into the row."""
        self.row = rows.merge(self.row, without_secrets(fields))

    def on_event(self, event: str, fields: Mapping[str, Any]) -> None:
        """Take in one event; those that say nothing of the row are ignored."""
        match event:
            case "ready":
                self.add(fields["fields"])
            case "rehearsal" | "begin":
                config = with_parts(self.spec.config, fields["parts"])
                self.add({"time": {"setup_s": fields.get("setup_s")}, "config": config})
                self.more_parts = fields["more_parts"]
            case "metrics":
                self.has_steps = True
            case "snapshot":
                self.has_saved = True
            case "row":
                about = {name: value for name, value in fields.items() if name != "rank"}
                self.reports[fields["rank"]] = RankReport(**about)
            case _:
                pass

    def add_reports(self, first_rank: int, all_ranks: Collection[int]) -> None:
        """When the ranks have ended, some perhaps without a report: merge the first rank's fields, and the largest
        memory peak of all."""
        ranks = {rank: self.reports[rank].fields if rank in self.reports else {} for rank in sorted(all_ranks)}
        first = ranks.get(first_rank, {})
        self.add({**first, "disturbed": together(self.row["disturbed"], first.get("disturbed"))})
        if len(ranks) > 1:
            self._add_memory(ranks)

    def _add_memory(self, ranks: Mapping[int, Mapping[str, Any]]) -> None:
        """The memory of each rank; the point's memory is that of the rank with the largest peak."""
        memory = {rank: fields.get("memory", {}) for rank, fields in ranks.items()}
        per_rank = [{"rank": rank, **{key: held.get(key) for key in OF_A_RANK}} for rank, held in memory.items()]
        self.add({"memory": max(memory.values(), key=lambda held: held.get("peak_bytes") or 0), "ranks": per_rank})

    def complete(self, disturbs: str | None = None) -> None:
        """At the end: add what follows from the rest of the row.

        Args:
            disturbs: why what is measured isn't comparable; None if it is.
        """
        if self.row["status"] == Status.INCOMPATIBLE and self.has_steps:
            self.add({"status": Status.ERROR})  # what has run stays, and can go on
        self.add({"disturbed": together(disturbs, self.row["disturbed"], *failed_checks(self.row))})
        if self.row["status"] == Status.OOM:
            advice = (self.row["plan"] or {}).get("advice", "try a smaller model or a larger vram")
            reasons = [self.row["reason"], advice]
            if (parts := self.more_parts) is not None:
                reasons.append(
                    f"a process that ran out of memory can't begin again with more parts: type accum.parts={parts}"
                )
            self.add({"reason": "; ".join(reasons)})


def together(*reasons: str | None) -> str | None:
    """All reasons, joined; None if there are none."""
    return "; ".join(filter(None, reasons)) or None
