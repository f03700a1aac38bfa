"""launcher=ray on a real Ray: whatever ends a job, the same command makes the point go on, and each row is there
once."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lowvram.cli import submit
from lowvram.config.errors import Refused
from lowvram.launch.ray import Ray
from tests.calls import ROOT, TINY, Outcome, children, history, read_row, wait_until
from tests.queued import by_name, job_in, log_of, wait_for_steps
from tests.real_ray import Cluster, cluster

Call = Callable[..., Outcome]
Disturb = Callable[[Cluster, Path], None]
pytestmark = pytest.mark.slow
STEPS = "train.steps=80"
SLOW = ("seed=5", "name=5.slow", "snapshot.every_steps=5", STEPS)  # each step takes 0.2 s
SUBMITS = ("-m", *TINY, "launcher=ray", "hydra.sweep.dir=s")
ORPHANED = r"(, interrupted: stopped after step |without a row \(FAILED: Job entrypoint command failed)"  # or not yet
undisturbed = list[Any]()  # the history of such a point, and its losses


@pytest.fixture(scope="module")
def started() -> Iterator[Cluster]:
    with cluster() as made:
        yield made


@pytest.fixture
def ray(started: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    for name, value in started.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(submit, "program", lambda: [sys.executable, str(ROOT / "train.py")])  # not that of `call`
    return started


def program_of(ray: Cluster, folder: Path) -> int:
    """The pid of the program that a job runs."""
    lines = ray.processes(ray.mark("")).items()
    return next(pid for pid, line in lines if "train.py resume=" in line and str(folder) in line)


def test_the_points_of_a_sweep_are_jobs(call: Call, train: Call, ray: Cluster, tmp_path: Path) -> None:
    """Each has a card of its own; their rows are those of points that ran here."""
    words = (*SUBMITS, "seed=1,2,3", "launcher.resources=[first:0.1]")
    first = train(*words, timeout_s=400)
    assert first.code == 0, first.said()
    folders = by_name(first)
    for name, folder in folders.items():
        assert f"{name}: submitted as Ray job {job_in(folder)}\n" in first.out
        assert ray.wait_for_end(job_in(folder)) == "SUCCEEDED", log_of(folder)
        assert re.search(rf"^Ray job {job_in(folder)} on .*, CUDA_VISIBLE_DEVICES=[01]$", log_of(folder), re.MULTILINE)
    done = call(*words)
    assert done.code == 0, done.said()
    assert "submitted" not in done.out
    assert done.statuses == {"seed1": "ok", "seed2": "ok", "seed3": "ok"}

    here = call("-m", *TINY, "seed=1,2,3", "hydra.sweep.dir=here/s")
    assert here.code == 0, here.said()
    assert sorted(tmp_path.glob("s/*/result.json")) == sorted(path / "result.json" for path in folders.values())
    for folder in folders.values():
        row, alone = read_row(folder), read_row(tmp_path / "here" / "s" / folder.name)
        for field in ("id", "name", "index", "logged", "choices", "loss", "status", "config"):
            assert row[field] == alone[field], field
        assert history(folder) == history(tmp_path / "here" / "s" / folder.name)


@pytest.mark.parametrize(
    ("num_gpus", "cards"), [("2", r"(0,1|1,0)"), ("0.5", "[01]"), ("0", "")], ids=["two", "half", "none"]
)
def test_a_job_sees_the_cards_that_it_asked_for(call: Call, ray: Cluster, num_gpus: str, cards: str) -> None:
    outcome = call(*TINY, "launcher=ray", f"launcher.num_gpus={num_gpus}", "launcher.resources=[first:0.1]")
    assert outcome.code == 0, outcome.said()
    assert ray.wait_for_end(job_in(outcome.folder)) == "SUCCEEDED", log_of(outcome.folder)
    assert re.search(rf"CUDA_VISIBLE_DEVICES={cards}$", log_of(outcome.folder), re.MULTILINE)
    assert outcome.row["status"] == "ok"


def kill_the_program(ray: Cluster, folder: Path) -> None:
    """The worker notices, and saves a snapshot."""
    os.kill(program_of(ray, folder), signal.SIGKILL)


def kill_the_worker(ray: Cluster, folder: Path) -> None:
    """Which is a row."""
    servers = [child for child in children(program_of(ray, folder)) if children(child)]
    os.kill(children(servers[0])[0], signal.SIGKILL)
    wait_until(lambda: (folder / "result.json").exists(), "a row", 60)
    assert read_row(folder)["status"] == "killed"


def stop_the_job(ray: Cluster, folder: Path) -> None:
    ray.stop(job_in(folder))
    assert ray.wait_for_end(job_in(folder)) == "STOPPED"
    assert read_row(folder)["status"] == "interrupted"
    newest = max(path.name for path in (folder / "snapshots").glob("step_*.pt"))
    step = int(newest.removeprefix("step_").partition(".")[0])
    assert read_row(folder)["reason"] == f"stopped after step {step} of 80"


def lose_the_node(ray: Cluster, folder: Path) -> None:
    ray.lose("second")


@pytest.mark.parametrize(
    ("disturb", "state", "said"),
    [
        (kill_the_program, "FAILED", ORPHANED),
        (kill_the_worker, "FAILED", r", killed: .*SIGKILL"),
        (stop_the_job, "STOPPED", ", interrupted: stopped after step "),
        (lose_the_node, "FAILED", r"without a row \(FAILED: Job supervisor actor died"),
    ],
)
def test_a_job_that_is_disturbed_goes_on(
    call: Call, ray: Cluster, tmp_path: Path, disturb: Disturb, state: str, said: str
) -> None:
    words = (*SUBMITS, *SLOW, f"launcher.resources=[{'second' if disturb is lose_the_node else 'first'}:0.1]")
    if disturb is lose_the_node:
        ray.start_second()
    first = call(*words)
    assert first.code == 0, first.said()
    folder = first.folder
    job = job_in(folder)
    wait_for_steps(folder, 12)
    meanwhile = call(*words)
    assert f"Ray job {job} is RUNNING\n" in meanwhile.out, meanwhile.said()
    disturb(ray, folder)
    assert ray.wait_for_end(job) == state, log_of(folder)
    if disturb is lose_the_node:
        ray.start_second()
    again = call(*words)
    assert again.code == 0, again.said()
    assert re.search(rf"Ray job {job} has ended.*{said}.*, submitted as Ray job {job_in(folder)}\n", again.out), (
        again.out
    )
    assert job_in(folder) != job
    assert ray.wait_for_end(job_in(folder)) == "SUCCEEDED", log_of(folder)
    assert re.search(r"continuing from .*step_0*\d+", log_of(folder)), log_of(folder)
    collected = call(*words)
    assert collected.code == 0, collected.said()
    assert "submitted" not in collected.out
    assert [path.parent for path in tmp_path.glob("s/*/result.json")] == [folder]
    assert read_row(folder)["status"] == "ok"

    if not undisturbed:
        alone = call("-m", *TINY, SLOW[0], *SLOW[2:], "hydra.sweep.dir=alone")
        assert alone.code == 0, alone.said()
        undisturbed[:] = [history(alone.folder), alone.row["loss"]]
    assert [history(folder), read_row(folder)["loss"]] == undisturbed


def test_without_the_token_nothing_is_submitted(
    call: Call, ray: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    for token, status in (("", 401), ("wrong", 403)):
        monkeypatch.setenv("RAY_AUTH_TOKEN", token)
        refused = call(*TINY, "launcher=ray")
        assert refused.sentence.startswith(f"launcher=ray: {ray.address} has answered HTTP {status}: ")
        assert refused.sentence.endswith("its token in RAY_AUTH_TOKEN, or in the file that RAY_AUTH_TOKEN_PATH names")
        assert not list(tmp_path.iterdir())


def test_a_lost_head_is_told_and_its_jobs_are_submitted_to_the_next(call: Call, ray: Cluster, tmp_path: Path) -> None:
    """A job that waits is not submitted twice. The last test: all nodes are lost with the head."""
    words = (*SUBMITS, *SLOW)
    nowhere = (*words, "launcher.resources=[nowhere:1]")
    folder = call(*nowhere).folder
    job = job_in(folder)
    assert f"Ray job {job} is PENDING\n" in call(*nowhere).out
    ray.lose()
    with pytest.raises(Refused, match="nothing answers at"):
        Ray().jobs()
    lost = call(*nowhere)
    assert lost.code == 3, lost.said()
    assert re.fullmatch(rf"launcher=ray: nothing answers at {ray.address}: [^\n]+; start Ray [^\n]+\n", lost.err)
    ray.start_head()
    time.sleep(1)
    again = call(*words)
    assert again.code == 0, again.said()
    assert f"Ray job {job} has ended without a row, submitted as Ray job {job_in(folder)}\n" in again.out
    assert ray.wait_for_end(job_in(folder)) == "SUCCEEDED", log_of(folder)
    assert list(call(*words).statuses.values()) == ["ok"]
