"""jobs=N with mode=search: its probes side by side, each process of N with a card of its own. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from typing import final

from lowvram.cli.here import Here, joined
from lowvram.cli.launchers import CALL, SIDE_BY_SIDE, calls_elsewhere
from lowvram.config.errors import Refused
from lowvram.config.settings import CHILDS_OWN
from lowvram.launch.pool import DIED, ONE, Pool, Slots, cards_in, slots_for
from lowvram.launch.spec import Point
from lowvram.launch.stop import StopConditions, stop_signals
from lowvram.results import row as rows
from lowvram.results.row import Row, Status
from lowvram.runs.run import run_point
from lowvram.search.measuring import Probes

here_elsewhere = cache(joined)


def slots_of(search: Point, here: Here) -> Slots:
    """The devices for the probes of a search; one if they run one after another. In a process that a launcher has
    started they do: other points have the other cards.

    Raises:
        Refused: `jobs` can't be had.
    """
    jobs = str(search.config["jobs"])
    if jobs == ONE or CALL in os.environ:
        return [None]
    config = {name: search.config[name] for name in CHILDS_OWN}
    answer = here.server.ask("probe_cards", {"config": config, "jobs": jobs}, StopConditions(None, stop_signals))
    if answer and answer["status"] != Status.OK:
        raise Refused(answer["reason"])
    if stop_signals():
        return [None]
    slots, kinds = slots_for(jobs, cards_in(answer, jobs)), answer["kinds"]
    if len(slots) > 1 and len(kinds) > 1:
        here.progress.say(f"one probe after another, as the cards differ: {', '.join(kinds)}")
        return [None]
    return slots


@contextmanager
def side_by_side(search: Point, slots: Slots, here: Here) -> Iterator[Probes]:
    """What runs the probes of a search on several devices."""
    here.server.stop()  # it has planned, and would keep memory
    if slots[0] is None:  # on a CPU
        here.progress.say(SIDE_BY_SIDE)
    with calls_elsewhere(), Pool(slots, probed, search.locks) as pool, suppress(KeyboardInterrupt):  # a third Ctrl-C
        yield Beside(pool)


@final
class Beside:
    """Runs probes in the processes of a pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    @property
    def num_idle(self) -> int:
        return self._pool.num_idle

    @property
    def num_running(self) -> int:
        return self._pool.num_running

    def give(self, work: Point) -> None:
        self._pool.give(work)

    def ended(self) -> Sequence[tuple[Point, Row]]:
        return [(probe, lost(probe) if row is DIED else row) for probe, row in self._pool.ended()]


def probed(probe: Point, locks: Sequence[int]) -> Row:
    """In a process of the pool: run one probe; returns its row."""
    here = here_elsewhere()
    probe = replace(probe, locks=locks)  # numbers of another process until now
    return run_point(probe, here.server, here.progress, stop_signals, here.plans.again)


def lost(probe: Point) -> Row:
    """The row of a probe whose process was killed; it is written if that process had written none."""
    killed = {"status": Status.KILLED.value, "reason": "the process that followed it was killed from outside"}
    row = rows.read(probe.folder)
    if row is None:
        row = rows.merge(probe.first_row(), killed)
        rows.write(probe.folder, row)
    return row
