"""jobs=N: points of a sweep at the same time, each with a device of its own."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobReturn
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig

from lowvram.cli.side_by_side import SideBySide
from lowvram.config.errors import BadInput, Refused
from lowvram.launch import pool
from lowvram.launch.pool import Pool, Slots, cards_in, slots_for
from tests.calls import TINY, Outcome, Running, history, read_row, wait_until
from tests.tiers import first_of

Call = Callable[..., Outcome]
Start = Callable[..., Running]


def test_each_job_has_a_card_of_its_own() -> None:
    assert slots_for("auto", []) == [None]
    assert slots_for("3", []) == [None] * 3
    assert slots_for("auto", ["0", "1"]) == ["0", "1"]
    assert slots_for("2", ["GPU-8f2", "MIG-1a", "3"]) == ["GPU-8f2", "MIG-1a"]
    with pytest.raises(BadInput, match="jobs='3': must be at most 2, the number of visible cards: two points would"):
        slots_for("3", ["0", "1"])


def test_without_a_list_of_cards_nothing_shares_one() -> None:
    assert cards_in({"status": "ok", "cards": ["0", "1"]}, "2") == ["0", "1"]
    assert cards_in({}, "1") == []
    with pytest.raises(Refused, match="jobs=2: the process that lists the cards was killed from outside"):
        cards_in({}, "2")


def doubled(number: int, held: Sequence[int]) -> tuple[int, int]:
    return 2 * number, os.getpid()


@pytest.mark.medium
def test_a_process_that_is_killed_while_it_waits_loses_nothing() -> None:
    with Pool(["0"], doubled) as processes:
        processes.give(1)
        ((_, (first, pid)),) = processes.ended()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not multiprocessing.active_children(), "its end")
        processes.give(2)
        ((_, (second, other)),) = processes.ended()
    assert (first, second) == (2, 4)
    assert pid != other


def test_what_can_not_be_meant_is_refused(call: Call) -> None:
    for jobs in ("0", "two", "-1", "1000"):
        assert call("-m", *TINY, "seed=1,2", f"jobs={jobs}").sentence.startswith(f"jobs='{jobs}': must be auto, one")
    refused = call("-m", *TINY, "seed=1,2", "jobs=2", "hydra/launcher=joblib")
    assert refused.sentence.startswith("jobs='2': must be 1 with another hydra/launcher")


def card_of(config: DictConfig) -> tuple[int, str, int]:
    """A task: which point runs where. One of them kills its process."""
    if config.deadly == config.number:
        os.kill(os.getpid(), signal.SIGKILL)
    return config.number, os.environ["CUDA_VISIBLE_DEVICES"], os.getpid()


CONFIG = (
    "number: 0\ndeadly: null\nhydra:\n  sweep: {dir: s}\n  output_subdir: null\n  job_logging: {root: {level: ERROR}}\n"
)


def launched(folder: Path, cards: Slots, num_points: int, *words: str) -> Sequence[JobReturn]:
    """Run points in a folder that is the working directory."""
    (folder / "config.yaml").write_text(CONFIG)
    with initialize_config_dir(str(folder), version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        config = hydra.compose_config("config", list(words), run_mode=RunMode.MULTIRUN, from_shell=False)
        launcher = SideBySide(lambda: cards)
        context = HydraContext(config_loader=hydra.config_loader, callbacks=Callbacks())
        launcher.setup(hydra_context=context, task_function=card_of, config=config)
        return launcher.launch([[f"number={number}", *words] for number in range(num_points)], 0)


@pytest.mark.medium
@pytest.mark.parametrize("num_points", first_of([24, 200]))
def test_each_point_runs_once_on_one_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_points: int) -> None:
    monkeypatch.chdir(tmp_path)
    found = [job.return_value for job in launched(tmp_path, ["0", "GPU-8f2", "MIG-1a", "3"], num_points)]
    assert [number for number, _, _ in found] == list(range(num_points))
    assert {card for _, card, _ in found} == {"0", "GPU-8f2", "MIG-1a", "3"}
    assert len({(card, process) for _, card, process in found}) == 4
    assert len(multiprocessing.active_children()) == 0


@pytest.mark.medium
def test_another_process_takes_the_next_point(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match="the process of point 2 was killed"):
        launched(tmp_path, ["0", "1"], 6, "deadly=2")
    assert len(multiprocessing.active_children()) == 0


def test_a_process_whose_program_has_died_meanwhile_begins_no_point(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = multiprocessing.Pipe()
    ours.send((0, ["number=0"]))
    monkeypatch.setattr(pool, "stop_with_parent", lambda: None)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=-1))
    pool.work(theirs, lambda work, held: None, pool.Held(()), None, 1)
    assert theirs.poll()
    assert not ours.poll()


@pytest.mark.slow
def test_a_point_that_fails_stops_no_other(train: Call) -> None:
    """What is typed again runs that point alone; rows differ from those of a sweep without jobs by what is measured."""
    words = ("-m", *TINY, "seed=1,2,3", "train.steps=3", "hydra.sweep.dir=s")
    outcome = train(*words, "jobs=2", "name=2.raise", timeout_s=200)
    assert outcome.code == 1, outcome.said()
    assert outcome.statuses == {"seed1": "ok", "seed2": "error", "seed3": "ok"}
    assert "points run at the same time" in outcome.out
    for row in outcome.rows.values():
        assert row["disturbed"] == "jobs=2: other points ran on this CPU at the same time"
    again = train(*words, "jobs=2", timeout_s=200)
    assert again.code == 0, again.said()
    assert again.out.count(": started, ") == 1
    alone = train(*words[:-1], "hydra.sweep.dir=alone", timeout_s=200)
    assert losses_in(again) == losses_in(alone)


def losses_in(outcome: Outcome) -> dict[str, list[float]]:
    return {
        read_row(folder)["name"]: [line["loss/train"] for line in history(folder) if "loss/train" in line]
        for folder in outcome.folders
    }


@pytest.mark.slow
def test_a_process_that_is_killed_loses_its_point_alone(start: Start, tmp_path: Path) -> None:
    slow = ("name=1.slow", "train.steps=900", "snapshot.every_steps=1")
    running = start("-m", *TINY, "seed=1,2,3", *slow, "hydra.sweep.dir=s", "jobs=2")
    wait_until(lambda: len(list(tmp_path.glob("s/*/result.json"))) == 2, "the ends of the two others", 200)
    (folder,) = [path.parent for path in tmp_path.glob("s/*/.lowvram") if not (path.parent / "result.json").exists()]
    os.kill(json.loads((folder / ".lowvram").read_text())["owner"]["pid"], signal.SIGKILL)
    outcome = running.end(120)
    assert outcome.code == 1, outcome.said()
    assert "hydra/launcher has failed: RuntimeError: the process of point 0 was killed" in outcome.err
    assert "to run what is missing: " in outcome.out
    assert any(folder.glob("snapshots/*"))
    running.wait_until_gone(20)


@pytest.mark.slow
def test_ctrl_c_saves_all_points_that_run(start: Start, tmp_path: Path) -> None:
    running = start("-m", *TINY, "seed=1,2,3,4", "name=s.slow", "train.steps=900", "hydra.sweep.dir=s", "jobs=2")
    wait_until(lambda: num_begun(tmp_path) == 2, "two points that make steps", 200)
    running.signal_group()
    outcome = running.end(120)
    assert outcome.code == 75, outcome.said()
    assert list(outcome.statuses.values()) == ["interrupted"] * 2
    running.wait_until_gone(20)


@pytest.mark.slow
def test_no_point_goes_on_without_the_program(start: Start, tmp_path: Path) -> None:
    running = start("-m", *TINY, "seed=1,2,3,4", "name=s.slow", "train.steps=900", "hydra.sweep.dir=s", "jobs=2")
    wait_until(lambda: num_begun(tmp_path) == 2, "two points that make steps", 200)
    running.process.kill()
    running.wait_until_gone(30)
    assert len(list(tmp_path.glob("s/*/metrics.jsonl"))) == 2
    assert all(any(path.parent.glob("snapshots/*")) for path in tmp_path.glob("s/*/metrics.jsonl"))


def num_begun(cwd: Path) -> int:
    return sum(len(file.read_text().splitlines()) > 1 for file in cwd.glob("s/*/metrics.jsonl"))
