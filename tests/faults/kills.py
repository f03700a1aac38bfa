"""Kills: SIGKILL of the program, its fork server, the point's process or all of them; then the same command again."""

from __future__ import annotations

from functools import partial

from tests.faults.lab import Lab, Trial, tail
from tests.faults.results import differences
from tests.faults.scenarios import ALL, Scenario
from tests.faults.shim import Page, Role
from tests.faults.telling import Draw, Told

VICTIMS = {
    "the program": (Role.PROGRAM,),
    "the fork server": (Role.SERVER,),
    "the point's process": (Role.CHILD,),
    "all": (Role.PROGRAM, Role.SERVER, Role.CHILD),
}
SLOW = ("search", "fidelity", "auto", "reruns")  # several seconds each: they come less often
SCENARIOS = [scenario for scenario in ALL for _ in range(1 if scenario.name in SLOW else 4)]
BY_TIME = 0.3  # of the kills; the others are at a call that changes a file
MOST_KILLS = 2
MOST_CALLS = 4  # of the command, until it is done


def trial(lab: Lab, draw: Draw) -> Told:
    random = draw.random
    scenario = random.choice(draw.among(SCENARIOS))
    wanted, num_calls, took_s = lab.undisturbed(scenario)
    trial = lab.trial(scenario, is_planted=random.random() < 0.5)
    told = Told(scenario.name)
    words = scenario.words
    for _ in range(random.randint(1, MOST_KILLS)):
        name = random.choice(list(VICTIMS))
        if random.random() < BY_TIME:
            after_s = random.uniform(0, took_s)
            ended = lab.run(words, trial.work, kill_after_s=after_s, victims=VICTIMS[name])
            told.about += f"; {name} killed after {after_s:.2f} s"
        else:
            number = random.randint(1, num_calls)
            ended = lab.run(words, trial.work, partial(arm, trial=trial, number=number, victims=VICTIMS[name]))
            told.about += f"; {name} killed at call {number} ({lab.page.hit.decode(errors='replace') or 'never'})"
        told.problems += ended.problems
        trial.foreign.plant_among_ours(trial.work / scenario.folder)
        words = goes_on(scenario, words, trial)
    told.problems += finish(lab, trial, scenario, words)
    told.problems += differences(wanted, trial.results()) if not told.problems else []
    told.problems += trial.foreign.changed() + trial.held()
    return told


def arm(page: Page, trial: Trial, number: int, victims: tuple[Role, ...]) -> None:
    page.begin(trial.work)
    page.kill(number, victims)


def goes_on(scenario: Scenario, words: tuple[str, ...], trial: Trial) -> tuple[str, ...]:
    """The words to go on with: a sweep's are the same, and so are those of a run that has left nothing yet."""
    run = trial.work / scenario.folder
    if scenario.before is not None or not scenario.resumes:
        return words
    has_row = (run / "result.json").exists()
    if any(run.glob("snapshots/step_0*.pt")):
        return (f"resume={scenario.folder}" if has_row else "resume=last",)
    if has_row:  # it can't go on: its user starts it anew in its folder
        trial.clear(run)
    return words


def finish(lab: Lab, trial: Trial, scenario: Scenario, words: tuple[str, ...]) -> list[str]:
    """Give the command again until it is done; returns what is wrong."""
    said = ""
    for _ in range(MOST_CALLS):
        ended = lab.run(words, trial.work)
        if ended.code == 0 or ended.problems:
            return ended.problems
        said = f"exit code {ended.code}: {ended.said}"
        words = goes_on(scenario, words, trial)
    return [f"not done after {MOST_CALLS} calls: {tail(said)}"]
