"""Signals to the program, its fork server, the point's process or all of them, most often SIGKILL; then the same
command again. SIGSTOP is followed by SIGCONT."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from tests.faults import together
from tests.faults.going_on import finish, goes_on
from tests.faults.lab import Act, Lab, Trial
from tests.faults.results import differences
from tests.faults.scenarios import ALL
from tests.faults.shim import Page, Role
from tests.faults.telling import Draw, Told
from tests.faults.warm import Program

VICTIMS = {
    "the program": (Role.PROGRAM,),
    "the fork server": (Role.SERVER,),
    "the point's process": (Role.CHILD,),
    "all": (Role.PROGRAM, Role.SERVER, Role.CHILD),
}
# Several seconds each: they come less often.
SLOW = ("search", "fidelity", "auto", "reruns", "train int8", "train int4", "train int8_dynamic")
SCENARIOS = [scenario for scenario in ALL for _ in range(1 if scenario.name in SLOW else 4)]
BY_TIME = 0.3  # of the kills; the others are at a call that changes a file
AGAIN = 0.3  # of the trials: what goes on gets a signal, too
TOGETHER = 12  # every how many trials two programs run in one folder instead
OTHER_SIGNALS = 0.3  # of the kills
OTHERS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGSTOP)
LONGEST_STOP_S = 0.5
EARLIER = re.compile(r"file .*/[12] snapshots$")  # a run that is asked to stop leaves one more, of whatever step
Send = Callable[[Sequence[Program], signal.Signals], object]


def trial(lab: Lab, draw: Draw) -> Told:
    if draw.number % TOGETHER == TOGETHER - 1:
        return together.trial(lab, draw)
    random = draw.random
    scenario = random.choice(draw.among(SCENARIOS))
    wanted, num_calls, took_s, _ = lab.undisturbed(scenario)
    trial = lab.trial(scenario, is_planted=random.random() < 0.5)
    told = Told(scenario.name)
    words, is_asked = scenario.words, False
    for _ in range(1 + (random.random() < AGAIN)):
        name, how = random.choice(list(VICTIMS)), signal.SIGKILL
        if random.random() < OTHER_SIGNALS:
            how = random.choice(OTHERS)
        # A point's process that outlives the program, or its fork server, is asked to stop by that.
        is_asked = is_asked or how != signal.SIGKILL or Role.CHILD not in VICTIMS[name]
        if random.random() < BY_TIME or how == signal.SIGSTOP:
            after_s = random.uniform(0, took_s)
            acts = signals(
                lambda programs, number, roles=VICTIMS[name]: lab.signal(number, roles), how, after_s, random
            )
            ended = lab.run(words, trial.work, acts=acts)
            told.about += f"; {how.name} to {name} after {after_s:.2f} s"
        else:
            number = random.randint(1, num_calls)
            ended = lab.run(words, trial.work, partial(arm, trial, number, VICTIMS[name], how))
            hit = lab.page.hit.decode(errors="replace") or "never"
            told.about += f"; {how.name} to {name} at call {number} ({hit})"
        told.problems += ended.problems
        trial.foreign.plant_among_ours(trial.work / scenario.folder)
        words = goes_on(scenario, words, trial)
    told.problems += finish(lab, trial, scenario, words)
    wrong = differences(wanted, trial.results()) if not told.problems else []
    told.problems += [one for one in wrong if not (is_asked and EARLIER.search(one))]
    told.problems += trial.foreign.changed() + trial.held()
    return told


def arm(trial: Trial, number: int, victims: tuple[Role, ...], how: signal.Signals, page: Page) -> None:
    page.begin(trial.work)
    page.kill(number, victims, how)


def signals(send: Send, how: signal.Signals, after_s: float, random: Random) -> list[Act]:
    """A signal at its time; a stop lasts for a moment."""
    acts: list[Act] = [(after_s, lambda programs: send(programs, how))]
    if how == signal.SIGSTOP:
        acts.append((after_s + random.uniform(0.05, LONGEST_STOP_S), lambda programs: send(programs, signal.SIGCONT)))
    return acts
