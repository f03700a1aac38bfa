"""hydra/sweeper=optuna: Optuna chooses points by the figures of the rows before."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from lowvram.cli.objective import Objective
from lowvram.cli.optuna_study import Study, StudySettings, distribution
from lowvram.config.errors import BadInput, Refused
from lowvram.results import row as rows
from lowvram.results.row import Row
from tests.calls import TINY, Outcome, read_row
from tests.tiers import first_of

optuna = pytest.importorskip("optuna")
Call = Callable[..., Outcome]
PLANNED = ("-m", "hydra/sweeper=optuna", *TINY, "mode=plan", "optimized_metric=plan.allocated_bytes")
MEMORY = Objective.named("memory.peak_bytes")


def swept(*words: str) -> list:
    return OverridesParser.create().parse_overrides(list(words))


def study(*words: str, objective: Objective = MEMORY, sampler: str = "tpe") -> Study:
    return Study(swept(*words), objective, StudySettings(n_trials=9, n_jobs=1, sampler=sampler, seed=0))


def row(status: str = "ok", peak: float | None = None, rate: float | None = None) -> Row:
    figures = {"memory": {"peak_bytes": peak}, "throughput": {"samples_per_s": rate}, "choices": {"mode": "measure"}}
    return rows.merge(rows.empty_row(), {"status": status, **figures})


def test_a_study_finds_the_smallest() -> None:
    told = study("a=int(interval(0,20))")
    for _ in range(40):
        ((number, words),) = told.ask(1).items()
        told.tell(number, words, row(peak=(int(words[0].removeprefix("a=")) - 7) ** 2))
    assert told.best()[0].startswith("best of ")
    assert " points: a=7 (memory.peak_bytes 0.00 MiB)" in told.best()[0]


def test_a_point_that_fails_is_told_as_such() -> None:
    told = study("a=1,2,3,4,5,6,7,8")
    ends = {"oom": "PRUNED", "incompatible": "PRUNED", "error": "FAIL", "killed": "FAIL"}
    for status, state in ends.items():
        (number,) = told.ask(1)
        told.tell(number, [f"a={status}"], row(status))
        assert told._study.trials[number].state.name == state
    (number,) = told.ask(1)
    told.tell(number, ["a=none"], None)
    assert told._study.trials[number].state.name == "FAIL"
    assert told.best() == []


def test_several_figures_each_in_its_direction() -> None:
    both = Objective.named(["memory.peak_bytes", "throughput.samples_per_s"])
    assert both.directions == ["minimize", "maximize"]
    told = study("a=1,2,3", objective=both, sampler="nsgaii")
    ends = {"1": row(peak=1, rate=1), "2": row(peak=2, rate=2), "3": row(peak=3, rate=1), "4": row("oom")}
    for value, end in ends.items():
        (number,) = told.ask(1)
        told.tell(number, [f"a={value}"], end)
    assert len(told.best()) == len({trial.params["a"] for trial in told._study.best_trials})
    assert {tuple(trial.values) for trial in told._study.best_trials} == {(1.0, 1.0), (2.0, 2.0)}


def test_what_is_chosen_from() -> None:
    words = ("a=interval(0,1)", "a=tag(log,interval(1e-5,1e-1))", "a=int(interval(1,5))", "a=range(1,9,2)", "a=x,y")
    kinds = [distribution(override) for override in swept(*words)]
    assert [type(kind).__name__ for kind in kinds] == [
        *("FloatDistribution", "FloatDistribution", "IntDistribution", "IntDistribution", "CategoricalDistribution"),
    ]
    assert kinds[1].log
    assert (kinds[3].low, kinds[3].high, kinds[3].step) == (1, 7, 2)
    assert kinds[4].choices == ("x", "y")
    with pytest.raises(BadInput, match=r"^a='tag\(log,interval\(0,1\)\)': must be what Optuna can choose from"):
        distribution(swept("a=tag(log,interval(0,1))")[0])


WRONG = {
    "optimized_metric=memory.peak": "optimized_metric='memory.peak': must be a figure of a row",
    "optimized_metric=null": "optimized_metric=null: must be a figure of a row",
    "optimized_metric=time.step_ms_p50": "optimized_metric=time.step_ms_p50: must be a figure of the points; with",
    "hydra.sweeper.n_trials=0": "hydra.sweeper.n_trials=0: must be a whole number of at least 1",
    "hydra.sweeper.sampler=grid": "hydra.sweeper.sampler='grid': must be one of tpe, random, nsgaii",
    "ckpt=every1,every9": "ckpt=every9: type ckpt=every1 ckpt.every=9",
    "optimizer.lr=-1": "optimizer.lr=-1.0: must be above 0",
    "process=inline": "process=inline: must be child with hydra/sweeper=optuna",
}


@pytest.mark.parametrize("word", first_of(list(WRONG), 3))
def test_mistakes_end_it(call: Call, word: str) -> None:
    outcome = call(*PLANNED, "accum=x2,x4", "hydra.sweeper.n_trials=2", word)
    assert outcome.code == 3, outcome.said()
    assert outcome.err.startswith(WRONG[word])


def test_nothing_to_choose(call: Call) -> None:
    assert "must be typed with keys to choose values of" in call(*PLANNED).sentence


def test_it_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(Refused, match=re.escape("pip install 'lowvram[optuna]'")):
        study("a=1,2")


def test_a_sweep_by_optuna_and_the_same_command_again(call: Call) -> None:
    """Small, so that it chooses points twice: they run once. More parts than samples are a row, not the end."""
    words = (*PLANNED, "accum=x2,x8", "hydra.sweeper.n_trials=3", "hydra.sweep.dir=outputs/s")
    outcome = call(*words)
    assert outcome.code == 0, outcome.said()
    assert "best of " in outcome.out
    assert re.search(r"^best of \d points: accum=x2 \(plan.allocated_bytes [\d.]+ .iB\)$", outcome.out, re.M)
    assert outcome.statuses.get("x8", "incompatible") == "incompatible"
    assert len(outcome.statuses) < 3
    assert "ok" in outcome.statuses.values()
    done = {folder: (folder / "result.json").stat().st_mtime_ns for folder in outcome.folders}
    again = call(*words)
    assert again.code == 0, again.said()
    assert {folder: (folder / "result.json").stat().st_mtime_ns for folder in again.folders} == done
    assert [line for line in again.out.splitlines() if line.startswith("best of")] == [
        line for line in outcome.out.splitlines() if line.startswith("best of")
    ]


@pytest.mark.slow
def test_a_point_that_runs_out_of_memory_does_not_end_it(call: Call) -> None:
    words = ("-m", "hydra/sweeper=optuna", *TINY, "mode=measure", "measure.warmup_steps=1", "measure.steps=1")
    outcome = call(
        *words, "optimized_metric=memory.peak_bytes", "seed=1,2", "name=1.out_of_memory", "hydra.sweeper.n_trials=4"
    )
    assert outcome.code == 0, outcome.said()
    assert outcome.statuses == {"seed1": "oom", "seed2": "ok"}
    assert [read_row(folder)["index"] for folder in outcome.folders] == [0, 1]
    assert "best of 2 points: seed=2 (memory.peak_bytes " in outcome.out
