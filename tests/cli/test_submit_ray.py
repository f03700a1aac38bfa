"""launcher=ray with a Jobs API that the tests make up: what is submitted, and when. What is the same with any queue is
in test_submit.py; the real Ray is in test_ray.py."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lowvram.results.files.run_folder import JOB_SCRIPT
from lowvram.runs.submission import Submission
from tests.calls import TINY, Outcome, history
from tests.fake_ray import FakeRay, fake_ray
from tests.queued import by_name

Call = Callable[..., Outcome]
SWEEP = ("-m", *TINY, "launcher=ray", "hydra.sweep.dir=s", "train.steps=2")


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    with fake_ray() as made:
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", made.address)
        yield made


@pytest.fixture
def run_job(call: Call, there: FakeRay, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Does what the job of a folder does, until its end."""

    def run(folder: Path) -> Outcome:
        submission = Submission.read(folder)
        assert submission is not None
        words = shlex.split((folder / JOB_SCRIPT).read_text().splitlines()[-1])
        with monkeypatch.context() as job:
            job.setenv("LOWVRAM_SUBMITTED", submission.token)
            outcome = call(*words[3:])
        there.end(submission.job_name, "SUCCEEDED" if outcome.code == 0 else "FAILED")
        return outcome

    return run


def test_the_same_command_submits_collects_and_submits_what_is_missing(
    call: Call, run_job: Call, there: FakeRay
) -> None:
    words = (*SWEEP, "seed=1,2", "launcher.resources=[a100:0.5]")
    first = call(*words)
    assert first.code == 0, first.said()
    assert "2 of 2 points are in the queue" in first.out
    folders = by_name(first)
    jobs = {name: str((found := Submission.read(path)) and found.job) for name, path in folders.items()}
    assert set(there.jobs) == set(jobs.values())
    assert [line for line in first.out.splitlines() if "Ray job" in line] == [
        f"{name}: submitted as Ray job {job}" for name, job in jobs.items()
    ]
    assert {job["entrypoint_resources"]["a100"] for job in there.jobs.values()} == {0.5}

    assert run_job(folders["seed1"]).code == 0
    there.end(jobs["seed2"], "FAILED", "Job supervisor actor failed to start within 900.0 seconds.")
    again = call(*words)
    assert again.code == 0, again.said()
    assert (
        f"seed2: Ray job {jobs['seed2']} has ended without a row (FAILED: Job supervisor actor failed to start within "
        "900.0 seconds.), submitted as Ray job seed2-"
    ) in again.out
    assert len(there.jobs) == 3
    assert run_job(folders["seed2"]).code == 0
    done = call(*words)
    assert done.code == 0, done.said()
    assert done.statuses == {"seed1": "ok", "seed2": "ok"}
    assert [line["step"] for line in history(folders["seed2"]) if "loss/train" in line] == [1, 2]


def test_where_nothing_can_be_submitted_nothing_is_left(call: Call, there: FakeRay, tmp_path: Path) -> None:
    for words, sentence in (
        (["launcher.address=http://127.0.0.1:1"], "launcher=ray: nothing answers at http://127.0.0.1:1: "),
        (["launcher.env=[NOT_SET]"], "launcher.env=['NOT_SET']: must be a list of variables that are set here"),
        (["launcher.num_gpus=1.5"], "launcher.num_gpus=1.5: must be from 0 to 1, or a whole number"),
        (["launcher.num_gpu=1"], "launcher.num_gpu: launcher has no such key"),
        (["jobs=2"], "jobs=2: must be 1 with launcher=ray: Ray decides how many points run at the same time"),
        (["hydra/sweeper=optuna"], "hydra/sweeper: must be left out with launcher=ray: it waits for"),
        (["logger.project=hf_abcdefghijklmnopqrst"], "logger.project: a secret can't be typed for a job, whose script"),
    ):
        assert call(*SWEEP, "seed=1,2", *words).sentence.startswith(sentence), words
        assert not list(tmp_path.iterdir())
    there.says["POST"] = (500, "Traceback:\nRuntimeError: no agent")
    for words in (SWEEP, (*TINY, "launcher=ray")):
        sentence = f"launcher=ray: {there.address} has answered HTTP 500: RuntimeError: no agent"
        assert call(*words).sentence == sentence
        assert not list(tmp_path.iterdir())
    assert there.jobs == {}


def test_a_job_that_was_perhaps_made_is_found(call: Call, there: FakeRay) -> None:
    there.says, there.takes = {"POST": None, "GET": None}, True
    there.says["GET /api/version"] = (200, '{"ray_version": "2"}')
    unsure = call(*SWEEP, "seed=1")
    assert unsure.code == 3, unsure.said()
    assert "hasn't said whether it takes the job: Remote end closed connection without response; if it" in unsure.err
    (job,) = there.jobs
    there.says = {}
    assert f"Ray job {job} is PENDING\n" in call(*SWEEP, "seed=1").out
    assert len(there.jobs) == 1


def test_a_point_that_another_queue_may_hold_is_not_submitted(
    call: Call, run_job: Call, there: FakeRay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = (*TINY, "launcher=ray", "hydra.run.dir=r", "train.steps=2")
    call(*words)
    (job,) = there.jobs
    for name, text in (("sbatch", "echo 12"), ("squeue", "true")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    sentence = call(*words, "launcher=slurm").sentence
    assert sentence == (
        f"r: its point was submitted with launcher=ray, job {job}: type that launcher to collect it, or remove "
        "r/queue_job.json once the job is gone"
    )
    assert run_job(tmp_path / "r").code == 0
    longer = call("resume=r", "train.steps=3", "launcher=slurm")
    assert "r: submitted as Slurm job 12\n" in longer.out, longer.said()
