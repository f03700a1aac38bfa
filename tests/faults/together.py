"""Two programs with the same words, in the same folder, one a moment after the other: one or both are refused, or they
wait for each other, and the results are those of one alone."""

from __future__ import annotations

import time

from tests.faults.going_on import finish, goes_on
from tests.faults.lab import Lab
from tests.faults.results import differences
from tests.faults.scenarios import BY_NAME
from tests.faults.telling import Draw, Told

SCENARIOS = ("train", "resume", "sweep", "sweep of one", "plan", "own", "prune", "train ddp", "search")


def trial(lab: Lab, draw: Draw) -> Told:
    random = draw.random
    scenario = random.choice(draw.among([BY_NAME[name] for name in SCENARIOS]))
    wanted, _, took_s, _ = lab.undisturbed(scenario)
    trial = lab.trial(scenario, is_planted=random.random() < 0.5)
    after_s = random.choice((0.0, random.uniform(0, took_s)))
    told = Told(f"{scenario.name}, and once more after {after_s:.2f} s")
    lab.page.rest()
    first = lab.begin(scenario.words, trial.work)
    while first.poll() is None and time.monotonic() - first.began < after_s:
        time.sleep(0.01)
    ended = lab.follow([first, lab.begin(scenario.words, trial.work, name="second")])
    told.about += f": {[one.code for one in ended]}"
    told.problems += [problem for one in ended for problem in one.problems]
    if any(one.code and not one.said.strip() for one in ended):
        told.problems.append("an exit code without a word")
    trial.foreign.plant_among_ours(trial.work / scenario.folder)
    if all(one.code for one in ended) or scenario.words[0] == "-m":
        told.problems += finish(lab, trial, scenario, goes_on(scenario, scenario.words, trial))
    told.problems += differences(wanted, trial.results()) if not told.problems else []
    told.problems += trial.foreign.changed() + trial.held()
    return told
