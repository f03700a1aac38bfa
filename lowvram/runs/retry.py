"""accum=auto: a point that runs out of memory begins again in fresh processes, with more parts. Imports no torch.

The logical batch stays, so the science does; a snapshot of the attempt before is gone on with. How many parts come next
is the knob's to say (lowvram/knobs/accum.py): the child tells it when it begins with its steps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lowvram.launch.point import Attempts, Config, Point, with_parts
from lowvram.results import row as rows
from lowvram.results.files.run_folder import has_snapshots
from lowvram.results.row import Row, Status


def continued(point: Point) -> Point:
    """The point with the parts that it had grown to, if it goes on with an earlier run."""
    config, attempts = as_left(point.config, rows.read(point.folder) if point.is_resumed else None)
    return point if attempts is None else replace(point, config=dict(config), attempts=attempts, plan=None)


def in_parts(point: Point, parts: int, row: Row) -> Point:
    """The next attempt, after one with `row` that ran out of memory."""
    config, is_resumed = with_parts(point.config, parts), has_snapshots(point.folder)
    return replace(point, config=config, is_resumed=is_resumed, attempts=attempts_with(row), plan=None)


def attempts_with(row: Row) -> Attempts:
    """Those so far, when that of `row` has run out of memory and another one follows."""
    about = {"parts": row["config"]["accum"]["parts"], "status": row["status"], "reason": row["reason"]}
    return [*(row["attempts"] or ()), about]


def as_left(config: Config, earlier: Row | None) -> tuple[Config, Attempts | None]:
    """The configuration of a run that goes on, in the parts that it had grown to, and the attempts until then.

    As it is if nothing had fitted, or if what was typed since shares out the batch in another way.
    """
    if earlier is None or not earlier["attempts"] or earlier["status"] == Status.OOM:
        return config, None
    first = with_parts(earlier["config"], earlier["attempts"][0]["parts"])
    if how_shared_out(first) != how_shared_out(config):
        return config, None
    return with_parts(config, earlier["config"]["accum"]["parts"]), earlier["attempts"]


def how_shared_out(config: Config) -> Any:
    """What says which samples a part holds."""
    return config["train"]["batch_size"], config["sharding"], config["accum"]
