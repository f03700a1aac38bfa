"""How a user goes on after a program was disturbed: the words to type, and typing them until it is done."""

from __future__ import annotations

from tests.faults.lab import Lab, Trial, tail
from tests.faults.scenarios import Scenario

MOST_CALLS = 4  # of the command, until it is done


def goes_on(scenario: Scenario, words: tuple[str, ...], trial: Trial) -> tuple[str, ...]:
    """The words to go on with: a sweep's are the same, and so are those of a run that has left nothing yet."""
    run = trial.work / scenario.folder
    if scenario.words[0].startswith("resume=") or not scenario.resumes:
        return words
    has_row = (run / "result.json").exists()
    if any(each.suffix in (".pt", ".shards") for each in run.glob("snapshots/step_0*")):
        return (f"resume={scenario.folder}" if has_row else "resume=last",)
    if has_row:  # it can't go on: its user starts it anew in its folder
        trial.clear(run)
    return words


def finish(lab: Lab, trial: Trial, scenario: Scenario, words: tuple[str, ...]) -> list[str]:
    """Give the command again until it is done; returns what is wrong."""
    said = ""
    for _ in range(MOST_CALLS):
        ended = lab.run(words, trial.work, num_programs=scenario.num_programs)
        if ended.code == 0 or ended.problems:
            return ended.problems
        said = f"exit code {ended.code}: {ended.said}"
        words = goes_on(scenario, words, trial)
    return [f"not done after {MOST_CALLS} calls: {tail(said)}"]
