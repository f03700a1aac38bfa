"""Several ranks, of one program or of torchrun's: signals to one, to all, or to their parents; then the same command
again."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence

from lowvram.launch.process_tree import children
from tests.faults.going_on import finish, goes_on
from tests.faults.kills import AGAIN, Send, signals
from tests.faults.lab import Lab
from tests.faults.results import differences
from tests.faults.scenarios import RANKS
from tests.faults.telling import Draw, Told
from tests.faults.warm import Program

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGSTOP)
EARLIEST = 0.2  # of the time of an undisturbed program: before that there are no ranks


def servers(programs: Sequence[Program]) -> list[int]:
    return [pid for program in programs for pid in children(program.pid)]


def ranks(programs: Sequence[Program]) -> list[int]:
    """Their processes, the first rank first."""
    return [pid for server in servers(programs) for pid in sorted(children(server))]


VICTIMS: dict[str, Callable[[Sequence[Program]], list[int]]] = {
    "the first rank": lambda programs: ranks(programs)[:1],
    "the last rank": lambda programs: ranks(programs)[-1:],
    "all ranks": ranks,
    "the first program": lambda programs: [programs[0].pid],
    "the last program": lambda programs: [programs[-1].pid],
    "a fork server": lambda programs: servers(programs)[-1:],
    "all": lambda programs: [pid for program in programs for pid in program.members()],
}


def trial(lab: Lab, draw: Draw) -> Told:
    random = draw.random
    scenario = random.choice(draw.among(RANKS))
    wanted, _, took_s, _ = lab.undisturbed(scenario)
    trial = lab.trial(scenario, is_planted=random.random() < 0.5)
    told, words = Told(scenario.name), scenario.words
    for _ in range(1 + (random.random() < AGAIN)):
        name, how = random.choice(list(VICTIMS)), random.choice(SIGNALS)
        after_s = random.uniform(EARLIEST, 1) * took_s
        acts = signals(to(VICTIMS[name]), how, after_s, random)
        ended = lab.run(words, trial.work, acts=acts, num_programs=scenario.num_programs)
        told.about += f"; {how.name} to {name} after {after_s:.2f} s: {ended.code}"
        told.problems += ended.problems
        trial.foreign.plant_among_ours(trial.work / scenario.folder)
        words = goes_on(scenario, words, trial)
    told.problems += finish(lab, trial, scenario, words)
    told.problems += differences(wanted, trial.results()) if not told.problems else []
    told.problems += trial.foreign.changed() + trial.held()
    return told


def to(victims: Callable[[Sequence[Program]], list[int]]) -> Send:
    """Sends signals to those who are the victims at the first of them: whoever was stopped is to go on."""
    chosen: list[int] = []

    def send(programs: Sequence[Program], number: signal.Signals) -> None:
        chosen.extend(() if chosen else victims(programs))
        for pid in chosen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    return send
