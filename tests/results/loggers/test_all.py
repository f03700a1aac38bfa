"""All loggers of a run: a failing one costs a sentence, and no other logger's records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, final

import pytest

from lowvram.config.parent_settings import LoggerSettings
from lowvram.results.loggers import all as all_loggers
from lowvram.results.loggers.all import LOGGERS, Loggers, switched_on
from lowvram.results.loggers.logger import LoggedRun, Logger
from lowvram.results.row import Row, empty_row

calls: list[str] = []


class Noting(Logger):
    """Notes its calls; raises where `fails_at` says."""

    title = "Noting"
    fails_at: ClassVar[str] = ""

    @classmethod
    def start(cls, run: LoggedRun) -> Self:
        cls()._note("start")
        return cls()

    def _note(self, name: str) -> None:
        if name == self.fails_at:
            raise OSError(28, "No space left on device")
        calls.append(f"{self.title}.{name}")

    def go_on(self, run: LoggedRun) -> None:
        self._note(f"go_on {run.step}")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._note(f"log {step}")

    def log_curves(self, section: str, curves: Mapping[str, Sequence[float]]) -> None:
        self._note("log_curves")

    def finish(self, row: Row) -> None:
        self._note("finish")


@final
class Failing(Noting):
    title = "Failing"


@pytest.fixture(autouse=True)
def loggers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls.clear()
    monkeypatch.setattr(all_loggers, "LOGGERS", {"wandb": Failing, "tensorboard": Noting})


def run_of(**settings: Any) -> LoggedRun:
    return LoggedRun(Path("run"), "a", None, "train", LoggerSettings(**settings))


def test_only_those_that_are_switched_on_begin():
    assert switched_on(LoggerSettings()) == []
    assert switched_on(LoggerSettings(tensorboard=True)) == [Noting]
    assert switched_on(LoggerSettings(wandb=True, tensorboard=True)) == [Failing, Noting]
    assert set(LOGGERS) <= set(LoggerSettings.__dataclass_fields__)


def test_each_is_told_everything_in_order():
    logged = Loggers()
    run = run_of(tensorboard=True)
    logged.begin(run)
    logged.log(1, {})
    logged.begin(run)  # again, in another process
    logged.log_curves("memory_in_step", {})
    logged.finish(empty_row())
    names = [call.partition(".")[2] for call in calls]
    assert names == ["start", "log 1", "go_on 0", "log_curves", "finish"]
    assert (logged.notes, logged.uploads) == ([], [])


@pytest.mark.parametrize("moment", ["start", "log 1", "go_on 0", "log_curves", "finish"])
def test_one_that_fails_costs_one_sentence(monkeypatch: pytest.MonkeyPatch, moment: str):
    monkeypatch.setattr(Failing, "fails_at", moment)
    logged, run = Loggers(), run_of(wandb=True, tensorboard=True)
    logged.begin(run)
    logged.log(1, {})
    logged.begin(run)
    logged.log_curves("memory_in_step", {})
    logged.finish(empty_row())
    assert [call for call in calls if call.startswith("Noting")] == [
        f"Noting.{name}" for name in ("start", "log 1", "go_on 0", "log_curves", "finish")
    ]
    (sentence,) = logged.notes
    what = "does not record this point" if moment == "start" else "stopped recording"
    assert sentence == f"Failing {what}: [Errno 28] No space left on device"
