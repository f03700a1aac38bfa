"""launcher=slurm with commands of Slurm's that the tests make up: what is submitted, and what a job does. The real
Slurm is in test_slurm.py."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from lowvram.cli.submit import flags
from lowvram.config import identity
from lowvram.results.files import late
from lowvram.results.files.run_folder import JOB_SCRIPT
from lowvram.runs.submission import Submission
from tests.calls import TINY, Outcome, history, read_row
from tests.queued import by_name

Call = Callable[..., Outcome]
SWEEP = ("-m", *TINY, "launcher=slurm", "hydra.sweep.dir=s")
SBATCH = """\
#!/bin/sh
[ -f {folder}/refuses ] && {{ cat {folder}/refuses >&2; exit 1; }}
id=$(($(wc -l < {folder}/submitted) + 1))
name=$(sed -n 's/^#SBATCH --job-name=//p' queue_job.sh)
echo "$id|PENDING|$name" | tee -a {folder}/submitted >> {folder}/jobs
[ -f {folder}/dies ] && kill -9 $PPID
echo $id
"""
SQUEUE = """\
#!/bin/sh
[ -f {folder}/silent ] && {{ echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1; }}
cat {folder}/jobs
"""


@dataclass(frozen=True)
class Slurm:
    """One that only keeps a list of jobs."""

    folder: Path

    def end(self, *jobs: str) -> None:
        """Let jobs be gone."""
        path = self.folder / "jobs"
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if line.partition("|")[0] not in jobs))

    @property
    def num_submitted(self) -> int:
        return len((self.folder / "submitted").read_text().splitlines())

    def write(self, name: str, text: str = "") -> Path:
        path = self.folder / name
        path.write_text(text)
        return path


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    folder = tmp_path_factory.mktemp("slurm")
    made = Slurm(folder)
    for name in ("jobs", "submitted"):
        made.write(name)
    for name, text in (("sbatch", SBATCH), ("squeue", SQUEUE)):
        made.write(name, text.format(folder=folder)).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return made


def command_in(folder: Path) -> list[str]:
    """The words of the command that a job runs."""
    text = (folder / JOB_SCRIPT).read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("srun ")]
    return shlex.split(line)[4:]


@pytest.fixture
def run_job(call: Call, slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Does what the job of a folder does, on a machine with another device, until its end."""

    def run(folder: Path, *more: str) -> Outcome:
        submission = Submission.read(folder)
        assert submission is not None
        with monkeypatch.context() as there:
            there.setenv("LOWVRAM_SUBMITTED", submission.token)
            there.setattr(identity, "device_name", lambda: "a card that only the node has")
            outcome = call(*command_in(folder), *more)
        slurm.end(str(submission.job))
        return outcome

    return run


def test_the_same_command_submits_collects_and_submits_what_is_missing(call: Call, run_job: Call, slurm: Slurm) -> None:
    words = (*SWEEP, "seed=1,2", "train.steps=2")
    first = call(*words)
    assert first.code == 0, first.said()
    assert [line for line in first.out.splitlines() if "Slurm job" in line] == [
        "seed1: submitted as Slurm job 1",
        "seed2: submitted as Slurm job 2",
    ]
    assert "2 of 2 points are in the queue" in first.out
    assert call(*first.command("to see their rows and submit what is missing")).code == 0
    assert slurm.num_submitted == 2

    folders = by_name(first)
    assert run_job(folders["seed1"]).code == 0
    slurm.end("2")
    again = call(*words)
    assert again.code == 0, again.said()
    assert "seed2: Slurm job 2 has ended without a row, submitted as Slurm job 3" in again.out
    assert "1 of 2 points are in the queue" in again.out
    assert slurm.num_submitted == 3
    assert run_job(folders["seed2"]).code == 0
    assert run_job(folders["seed2"]).code == 0  # begun a second time: it is finished
    done = call(*words)
    assert done.code == 0, done.said()
    assert done.statuses == {"seed1": "ok", "seed2": "ok"}
    assert [line["step"] for line in history(folders["seed2"]) if "loss/train" in line] == [1, 2]


def test_a_row_that_is_seen_late_is_waited_for(
    call: Call, run_job: Call, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a network's file system: the node has written it, and this machine doesn't know it yet."""
    words = (*SWEEP, "seed=1,2", "train.steps=2")
    folders = by_name(call(*words))
    for folder in folders.values():
        assert run_job(folder).code == 0
        (folder / "result.json").rename(folder / "unseen")

    def see(_: Path) -> bool:
        """Is asked while something is missing, before a wait."""
        for folder in folders.values():
            if (folder / "unseen").exists():
                (folder / "unseen").rename(folder / "result.json")
        return True

    monkeypatch.setattr(late, "is_shared", see)
    done = call(*words)
    assert done.code == 0, done.said()
    assert done.statuses == {"seed1": "ok", "seed2": "ok"}
    assert slurm.num_submitted == 2


def test_a_row_is_that_of_a_point_that_ran_here(call: Call, run_job: Call) -> None:
    words = (*SWEEP, "seed=1,2", "optimizer=sgd", "train.steps=2")
    folders = by_name(call(*words))
    for folder in folders.values():
        run_job(folder)
    here = call("-m", *TINY, "seed=1,2", "optimizer=sgd", "train.steps=2", "hydra.sweep.dir=here/s")
    assert here.code == 0, here.said()
    for folder in here.folders[-2:]:
        row, submitted = read_row(folder), read_row(folder.parents[2] / "s" / folder.name)
        for field in ("id", "name", "index", "logged", "choices", "loss", "status", "config"):
            assert submitted[field] == row[field], field
        assert submitted["provenance"]["device_name"] == "a card that only the node has"


def test_a_point_that_can_not_run_leaves_a_row(call: Call, run_job: Call, slurm: Slurm) -> None:
    """Also if only the job finds that; it isn't submitted again."""
    words = (*SWEEP, "stepping=zeroth_order", "precision=bf16_pure,fp32")
    first = call(*words)
    assert first.code == 0, first.said()
    folders = by_name(first)
    assert run_job(folders["bf16_pure"]).code == 3
    assert read_row(folders["bf16_pure"])["status"] == "incompatible"
    again = call(*words)
    assert again.code == 0, again.said()
    assert "1 of 2 points are in the queue" in again.out
    assert "bf16_pure: incompatible: stepping=zeroth_order needs that " in again.out
    assert slurm.num_submitted == 2


def test_a_job_whose_number_is_not_known_is_found_by_its_name(call: Call, slurm: Slurm) -> None:
    words = (*SWEEP, "seed=1", "device=cuda", "launcher.time=4:00:00", 'launcher.lines=["--constraint=a100"]')
    folder = call(*words).folder  # here may be no card
    assert {"#SBATCH --time=4:00:00", "#SBATCH --constraint=a100"} <= set(
        (folder / JOB_SCRIPT).read_text().splitlines()
    )
    submission = Submission.read(folder)
    assert submission is not None
    replace(submission, job=None).write(folder)
    assert "Slurm job 1 is PENDING" in call(*words).out
    assert Submission.read(folder) == submission
    assert slurm.num_submitted == 1


@pytest.mark.slow
def test_a_program_that_dies_after_a_job_was_made_submits_it_once(call: Call, train: Call, slurm: Slurm) -> None:
    dies = slurm.write("dies")
    died = train(*SWEEP, "seed=1,2")
    assert died.code == -9, died.said()
    assert slurm.num_submitted == 1
    dies.unlink()
    again = call(*SWEEP, "seed=1,2")
    assert again.code == 0, again.said()
    assert "seed1: Slurm job 1 is PENDING" in again.out
    assert slurm.num_submitted == 2


def test_where_nothing_can_be_submitted_nothing_is_left(
    call: Call, slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.write("refuses", "sbatch: error: Invalid account\n")
    single, several = (*TINY, "launcher=slurm"), (*SWEEP, "seed=1,2")
    for words in (single, several):
        sentence = "launcher=slurm: sbatch has refused the job: Invalid account"
        assert call(*words).sentence == sentence
        assert not list(tmp_path.iterdir())
    (slurm.folder / "sbatch").unlink()
    monkeypatch.setenv("PATH", str(slurm.folder))
    for words in (single, several):
        assert call(*words).sentence.startswith("launcher=slurm: there is no sbatch on PATH: type this on a machine")
        assert not list(tmp_path.iterdir())


def test_what_was_submitted_is_told_before_a_refusal(call: Call, slurm: Slurm, tmp_path: Path) -> None:
    text = (slurm.folder / "sbatch").read_text()
    (slurm.folder / "sbatch").write_text(text.replace("echo $id\n", f"echo $id; echo full > {slurm.folder}/refuses\n"))
    outcome = call(*SWEEP, "seed=1,2,3")
    assert outcome.code == 3, outcome.said()
    assert "seed1: submitted as Slurm job 1" in outcome.out
    assert "1 of 2 points are in the queue" in outcome.out
    assert outcome.err == "launcher=slurm: sbatch has refused the job: full\n"
    assert len([path for path in (tmp_path / "s").iterdir() if path.is_dir()]) == 1


def test_without_an_answer_nothing_is_submitted(call: Call, slurm: Slurm) -> None:
    words = (*SWEEP, "seed=1,2")
    call(*words)
    slurm.write("silent")
    outcome = call(*words)
    assert outcome.code == 3, outcome.said()
    sentence = "launcher=slurm: squeue doesn't tell which jobs there are: slurm_load_jobs error: Unable to contact"
    assert outcome.err.startswith(sentence)
    assert slurm.num_submitted == 2


def test_what_can_not_be_meant_is_refused(call: Call, tmp_path: Path, slurm: Slurm) -> None:
    several = (*SWEEP, "seed=1,2")
    for words, sentence in (
        ((*several, "jobs=2"), "jobs=2: must be 1 with launcher=slurm: Slurm decides how many points run"),
        ((*several, "hydra/launcher=joblib"), "hydra/launcher: must be left out with launcher=slurm"),
        ((*several, "hydra/sweeper=optuna"), "hydra/sweeper: must be left out with launcher=slurm"),
        ((*several, "process=inline"), "process='inline': must be child where Slurm starts the program"),
        ((*several, "launcher.cpus=0"), "launcher.cpus=0: must be null or at least 1"),
        ((*several, "launcher.partitoin=x"), "launcher.partitoin: launcher has no such key"),
        ((*several, "precision=bf17"), "precision=bf17: must be one of "),
        ((*TINY, "launcher=slurm", "optimizer.lr=-1"), "optimizer.lr=-1"),
        ((*TINY, "launcher=pbs"), "launcher=pbs: must be one of local, ray, slurm"),
        ((*TINY, "launcher.partition=low"), "launcher.partition: launcher has no such key"),
        ((*TINY, "launcher=slurm", "launcher._target_=lowvram.tasks.Auto"), "launcher."),
        (
            (*TINY, "launcher=slurm", "logger.project=hf_abcdefghijklmnopqrst"),
            "logger.project: a secret can't be typed",
        ),
    ):
        assert call(*words).sentence.startswith(sentence), words
        assert not list(tmp_path.iterdir())
    assert slurm.num_submitted == 0


def test_a_single_run(call: Call, run_job: Call, slurm: Slurm, tmp_path: Path) -> None:
    """It is submitted once; another configuration isn't submitted into its folder; it may be run here instead."""
    words = (*TINY, "launcher=slurm", "hydra.run.dir=r", "train.steps=2")
    assert "r: submitted as Slurm job 1\n" in call(*words).out
    assert "r: Slurm job 1 is PENDING\n" in call(*words).out
    other = call(*words, "seed=7")
    assert other.sentence.startswith("Slurm job 1 (PENDING) runs another configuration in r: wait for its end")
    here = call("resume=r")
    assert here.code == 0, here.said()
    assert read_row(tmp_path / "r")["status"] == "ok"
    assert run_job(tmp_path / "r", "launcher=slurm").code == 0  # as if it were the user's default in conf/local
    assert [line["step"] for line in history(tmp_path / "r") if "loss/train" in line] == [1, 2]
    longer = call("resume=r", "train.steps=3", "launcher=slurm")
    assert "submitted as Slurm job 2" in longer.out
    assert "train.steps=3" in command_in(tmp_path / "r")
    assert run_job(tmp_path / "r", "launcher=slurm").code == 0
    assert [line["step"] for line in history(tmp_path / "r") if "loss/train" in line] == [1, 2, 3]
    assert slurm.num_submitted == 2


def test_flags_that_say_where_options_are_go_to_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "-m", "--config-dir", "my folder", "-cn=mine", "seed=1"])
    assert flags() == ["--config-dir=my folder", "--config-name=mine"]
    monkeypatch.setattr("sys.argv", ["train.py", "-m", "seed=1", "model.name=--config-dir"])
    assert flags() == []


@pytest.mark.slow
def test_a_job_finds_options_where_they_were_found(call: Call, run_job: Call, tmp_path: Path, slurm: Slurm) -> None:
    mine = tmp_path / "mine" / "sweep" / "two.yaml"
    mine.parent.mkdir(parents=True)
    points = 'hydra:\n  mode: MULTIRUN\n  sweeper:\n    points: {short: train.steps=1, "a long one": train.steps=2}\n'
    mine.write_text(f"# @package _global_\n{points}")
    tiny = [word for word in TINY if word != "train.steps=3"]
    words = ("--config-dir", "mine", *tiny, "launcher=slurm", "sweep=two", "hydra.sweep.dir=s")
    first = call(*words)
    assert first.code == 0, first.said()
    assert slurm.num_submitted == 2
    for folder in first.folders:
        outcome = run_job(folder)
        assert outcome.code == 0, outcome.said()
    assert call(*words).statuses == {"short": "ok", "a long one": "ok"}


def test_a_job_that_was_perhaps_made_is_found(call: Call, slurm: Slurm, tmp_path: Path) -> None:
    text = (slurm.folder / "sbatch").read_text()
    (slurm.folder / "sbatch").write_text(
        text.replace("echo $id\n", "echo 'sbatch: error: Socket timed out' >&2; exit 1")
    )
    for words in ((*TINY, "launcher=slurm", "hydra.run.dir=r"), (*SWEEP, "seed=1")):
        unsure = call(*words)
        assert unsure.code == 3, unsure.said()
        assert "says 'Socket timed out': if it has made a job, squeue shows it as " in unsure.err
    (slurm.folder / "sbatch").write_text(text)
    assert "r: Slurm job 1 is PENDING" in call(*TINY, "launcher=slurm", "hydra.run.dir=r").out
    assert "Slurm job 2 is PENDING" in call(*SWEEP, "seed=1").out
    assert slurm.num_submitted == 2
