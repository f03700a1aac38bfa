"""Failing writes: one call that changes a file fails, or it and all later ones; then, on a sound disk, once more. Every
third trial sets a real limit instead (limits.py).

Trials take the calls of each program in turn, so that as many trials as there are calls try every one of them.
"""

from __future__ import annotations

import errno
import os
import re
from functools import partial

from tests.faults import limits
from tests.faults.going_on import finish, goes_on
from tests.faults.lab import Ended, Lab, Trial
from tests.faults.results import differences
from tests.faults.scenarios import BY_NAME
from tests.faults.shim import ERRORS, Page
from tests.faults.telling import Draw, Told

SCENARIOS = (
    *("train", "sweep", "resume", "measure", "train every", "sweep of one", "resume parts", "search"),
    *("own", "images", "train tensorboard", "teach", "prune"),
)
OLDER = re.compile(r"file .*/\d+ snapshots$")  # one couldn't be removed, and is sound
LASTING = 0.3  # of the trials: the disk stays full


def trial(lab: Lab, draw: Draw) -> Told:
    if draw.number % 3 == 2:
        return limits.trial(lab, draw)
    scenarios = draw.among([BY_NAME[name] for name in SCENARIOS])
    random, scenario = draw.random, scenarios[draw.number % len(scenarios)]
    wanted, num_calls, *_ = lab.undisturbed(scenario)
    number = draw.in_turn(draw.number // len(scenarios), num_calls)
    error, is_lasting = random.choice(ERRORS), random.random() < LASTING
    trial = lab.trial(scenario, is_planted=random.random() < 0.5)
    ended = lab.run(scenario.words, trial.work, partial(arm, trial, number, error, is_lasting))
    call = lab.page.hit.decode(errors="replace")
    about = f"{scenario.name}: {errno.errorcode[error]} at call {number}{' and after' if is_lasting else ''} ({call})"
    told = Told(about, [*ended.problems, *unclear(ended, error)])
    trial.foreign.plant_among_ours(trial.work / scenario.folder)
    if ended.code == 0:
        told.problems += [one for one in differences(wanted, trial.results()) if "file" not in one]
    if ended.code != 0 or scenario.words[0] == "-m":
        told.problems += finish(lab, trial, scenario, goes_on(scenario, scenario.words, trial))
        wrong = differences(wanted, trial.results()) if not told.problems else []
        told.problems += [one for one in wrong if not OLDER.search(one)]
    told.problems += trial.foreign.changed() + trial.held()
    return told


def arm(trial: Trial, number: int, error: int, is_lasting: bool, page: Page) -> None:
    page.begin(trial.work)
    page.fail(number, error, is_lasting)


def unclear(ended: Ended, error: int) -> list[str]:
    """What is wrong with how it was told."""
    if ended.code == 0:
        return []
    problems = []
    if os.strerror(error) not in ended.said and not (error == errno.ENOSPC and "the disk is full" in ended.said):
        problems.append(f"exit code {ended.code} without {os.strerror(error)!r}: {ended.said[-800:]}")
    if ended.code == 3 and error != errno.EACCES:
        problems.append(f"exit code 3 for a broken disk: {ended.said[-800:]}")
    return problems
