"""hydra/launcher=joblib and submitit_local: points in processes of a launcher's leave what they leave without it."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lowvram.cli import launchers
from lowvram.cli.closing import held_by_others
from lowvram.cli.job import Ending
from lowvram.cli.sweep import UntilOver
from lowvram.config.errors import Refused
from lowvram.launch.stop import SignalCount, stop_signals
from tests.calls import TINY, Outcome, Running, history, read_row, wait_until

Call = Callable[..., Outcome]
Start = Callable[..., Running]
JOBLIB = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
LAUNCHERS = {"joblib": JOBLIB, "submitit_local": ("hydra/launcher=submitit_local",)}
CHANGED = ("hydra/launcher", "hydra.launcher", "seed=", "name=")
each_launcher = pytest.mark.parametrize("launcher", LAUNCHERS.values(), ids=LAUNCHERS)


@pytest.mark.slow
@each_launcher
def test_a_sweep_in_parallel_processes(train: Call, tmp_path: Path, launcher: tuple[str, ...]) -> None:
    """Among files of the user's, one of its points fails; what is typed again runs that one alone."""
    mine = tmp_path / "thesis.tex"
    mine.write_text("It was a dark and stormy night.")
    words = ("-m", *TINY, *launcher, "hydra.sweep.dir=.", "precision=fp32,bf16", "seed=1,2")
    outcome = train(*words, "name=2.raise", timeout_s=300)
    assert outcome.code == 1, outcome.said()
    expected = {"fp32-seed1": "ok", "fp32-seed2": "error", "bf16-seed1": "ok", "bf16-seed2": "error"}
    assert outcome.statuses == expected
    assert launchers.SIDE_BY_SIDE in outcome.out
    table = outcome.out[outcome.out.index("| name") :]
    assert re.findall(r"^\| (\S+) +\| (\w+) ", table, re.MULTILINE)[1:] == list(expected.items())
    for name in ("table.md", "report.html", "rows.jsonl"):
        assert "bf16-seed2" in (tmp_path / name).read_text()
    assert [read_row(folder)["index"] for folder in sorted(outcome.folders, key=index)] == [0, 1, 2, 3]

    done = {folder: (folder / "result.json").stat().st_mtime_ns for folder in outcome.folders if is_ok(folder)}
    again = train(*words, timeout_s=300)
    assert again.code == 0, again.said()
    assert set(again.statuses.values()) == {"ok"}
    assert {folder: (folder / "result.json").stat().st_mtime_ns for folder in done} == done
    assert again.out.count(": measured at ") == 2
    assert mine.read_text() == "It was a dark and stormy night."


def index(folder: Path) -> int:
    return read_row(folder)["index"]


def is_ok(folder: Path) -> bool:
    return read_row(folder)["status"] == "ok"


@pytest.mark.slow
@each_launcher
def test_ctrl_c_saves_what_runs_everywhere(start: Start, call: Call, tmp_path: Path, launcher: tuple[str, ...]) -> None:
    """Nothing else is started, nothing stays, and the printed command does the rest."""
    seeds = "seed=1,2,3,4,5,6,7,8" if launcher == JOBLIB else "seed=1,2"
    slow = "name=" + "+".join(f"{seed}.slow" for seed in range(1, 9))
    running = start("-m", *TINY, *launcher, seeds, slow, "train.steps=900", "hydra.sweep.dir=s")
    wait_until(lambda: num_begun(tmp_path) == 2, "two points that make steps", 200)
    running.signal_group()
    outcome = running.end(120)
    assert outcome.code == 75, outcome.said()
    assert "Traceback" not in outcome.said()
    assert list(outcome.statuses.values()) == ["interrupted"] * 2
    for row in outcome.rows.values():
        assert re.fullmatch(r"stopped after step \d+ of 900", row["reason"])
    running.wait_until_gone(20)
    left = {path.name for path in (tmp_path / "s").iterdir() if path.is_dir() and path.name != ".submitit"}
    assert left == {folder.name for folder in outcome.folders}

    assert seeds in outcome.command("to run what is missing")
    words = [word for word in outcome.command("to run what is missing") if not word.startswith(CHANGED)]
    seeds_of_rows = ",".join(str(row["config"]["seed"]) for row in outcome.rows.values())
    again = call(*words, f"seed={seeds_of_rows}")  # without the launcher: points are the same
    assert again.code == 0, again.said()
    for folder in outcome.folders:
        assert is_ok(folder)
        assert [line["step"] for line in history(folder) if "loss/train" in line] == list(range(1, 901))


def num_begun(cwd: Path) -> int:
    return sum(len(file.read_text().splitlines()) > 1 for file in cwd.glob("s/*/metrics.jsonl"))


@pytest.mark.slow
def test_a_process_of_the_launcher_that_is_killed(start: Start, tmp_path: Path) -> None:
    """The table of what is there, one sentence, exit code 1; the point goes on with its snapshot when typed again."""
    slow = ("name=2.slow", "train.steps=900", "snapshot.every_steps=1")
    running = start("-m", *TINY, *JOBLIB, "seed=1,2", *slow, "hydra.sweep.dir=s")
    wait_until(lambda: num_begun(tmp_path) == 2 and any(tmp_path.glob("s/*/result.json")), "one point's end", 200)
    (folder,) = [path.parent for path in tmp_path.glob("s/*/.lowvram") if not (path.parent / "result.json").exists()]
    os.kill(json.loads((folder / ".lowvram").read_text())["owner"]["pid"], signal.SIGKILL)
    outcome = running.end(120)
    assert outcome.code == 1, outcome.said()
    assert "hydra/launcher has failed: " in outcome.err
    assert "to run what is missing: " in outcome.out
    assert any(folder.glob("snapshots/*"))
    running.wait_until_gone(20)


@pytest.mark.slow
def test_what_cannot_be_had_elsewhere_is_refused(train: Call) -> None:
    inline = train("-m", *TINY, *JOBLIB, "process=inline")
    assert inline.sentence == "process=inline: must be child where a launcher starts the processes"
    assert train("-m", *TINY, *JOBLIB, "seed=1,2", "precision=nope").sentence.startswith(
        "precision=nope: must be one of"
    )
    assert list(inline.cwd.iterdir()) == []


# Without a launcher


def test_signals_are_passed_on_and_the_third_leaves(tmp_path: Path) -> None:
    stops = tmp_path / "stops"
    stops.touch()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    stop_signals.listen()
    jobs = SignalCount()
    jobs._stops_file = stops

    def interrupt() -> None:
        for num in (1, 2):
            os.kill(os.getpid(), signal.SIGINT)
            wait_until(lambda num=num: jobs() == num, f"{num} signals", 5)
            assert stop_signals() == num
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    try:
        with launchers.signals_passed_on(stops), pytest.raises(KeyboardInterrupt):
            interrupt()
        assert jobs() == 2
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    finally:
        stop_signals.listen()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_what_a_shell_repeats_is_passed_on_once(tmp_path: Path) -> None:
    stops = tmp_path / "stops"
    stops.touch()
    stop_signals.listen()
    with launchers.signals_passed_on(stops):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(3 * launchers.POLL_S)
    assert (stops.stat().st_size, stop_signals()) == (1, 1)


def test_a_signal_that_comes_both_ways_counts_once(tmp_path: Path) -> None:
    stops = tmp_path / "stops"
    stops.write_bytes(b".")
    jobs = SignalCount()
    jobs._stops_file = stops
    jobs.add(signal.SIGTERM)
    assert jobs() == 1
    stops.unlink()
    assert jobs() == 1


def test_a_batch_ends_between_two_points() -> None:
    ran: list[str] = []
    batch = UntilOver([["seed=1"], ["seed=2"], ["seed=3"]], lambda: len(ran) == 2)
    for (word,) in batch:
        ran.append(word)
    assert ran == ["seed=1", "seed=2"]
    assert len(batch) == 3


def test_a_point_that_comes_twice_side_by_side_is_no_other_programs() -> None:
    first, again = Ending(0, Path("s/a")), Ending(1, Path("s/a"), holder="process 1")
    other = Ending(2, Path("s/b"), holder="process 2")
    assert held_by_others([first, again, other]) == [other]


def test_an_ending_goes_from_process_to_process() -> None:
    """Its refusal too: many exceptions can't be made again from their texts."""
    ending = Ending(3, Path("s"), refusal=Refused("precision=x: must be one of"))
    again = pickle.loads(pickle.dumps(ending))
    assert (again.index, again.folder, str(again.refusal)) == (3, Path("s"), "precision=x: must be one of")


@pytest.mark.parametrize(("before", "now", "seen"), [(None, "", None), ("1", "", "1"), ("1", "0", "0")])
def test_cards_that_a_launcher_hides(
    monkeypatch: pytest.MonkeyPatch, before: str | None, now: str, seen: str | None
) -> None:
    monkeypatch.setenv(launchers.CARDS, now)
    launchers.see_cards(before)
    assert os.environ.get(launchers.CARDS) == seen


def test_the_folder_is_handed_on_where_words_are_read_only() -> None:
    """As they are from Hydra 1.4 on."""
    config = OmegaConf.create({"hydra": {"sweep": {"dir": "s"}, "overrides": {"hydra": ["hydra.verbose=false"]}}})
    OmegaConf.set_readonly(config, True)
    with launchers.jobs_elsewhere(config):
        assert config.hydra.overrides.hydra == ["hydra.verbose=false", 'hydra.sweep.dir="s"']
    assert OmegaConf.is_readonly(config.hydra.overrides.hydra)
