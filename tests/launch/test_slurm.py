"""Batch scripts, and what Slurm's commands answer. The scripts run under bash, with commands of Slurm's that tests
make up; tests/cli/test_slurm.py has the real ones."""

from __future__ import annotations

import os
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lowvram.config.errors import BadInput, Refused
from lowvram.config.schema import build
from lowvram.launch.launcher import Queued, Unsure, Work, job_name
from lowvram.launch.slurm import Slurm, environment, jobs_in, reason_in, script, seconds_of

COMMAND = ["python", "train.py", "resume=x", "name=it's"]


def slurm(**values: Any) -> Slurm:
    """As the YAML with these values makes it."""
    node = OmegaConf.create({"_target_": "lowvram.launch.slurm.Slurm", **values})
    return build(node, "launcher")


def work(folder: Path, command: list[str] = COMMAND) -> Work:
    return Work("seed1-0a1b2c3d", "0a1b2c3d", folder, command, folder.parent)


def test_values_that_slurm_could_not_read_are_refused() -> None:
    for values, sentence in (
        ({"partition": "two words"}, "launcher.partition='two words': must be null or the name of one, without blanks"),
        ({"partition": ""}, "launcher.partition='': must be null or the name of one, without blanks"),
        (
            {"gres": "gpu:1\n#SBATCH --uid=0"},
            "launcher.gres='gpu:1\\n#SBATCH --uid=0': must be null or text such as gpu:1",
        ),
        ({"account": "a b"}, "launcher.account='a b': must be null or a name"),
        ({"cpus": 0}, "launcher.cpus=0: must be null or at least 1"),
        ({"cpus": "many"}, "launcher.cpus='many': must be a whole number or null"),
        ({"mem": "32GB"}, "launcher.mem='32GB': must be null or a number with K, M, G or T, such as 32G"),
        ({"time": "soon"}, "launcher.time='soon': must be null, minutes, or H:MM:SS, D-H, D-H:MM or D-H:MM:SS"),
        (
            {"time": "3"},
            "launcher.time='3': must be more than launcher.grace_s and a minute, which is 180 seconds: points",
        ),
        ({"grace_s": 0}, "launcher.grace_s=0: must be from 1 to 65535 seconds"),
        ({"lives": 0}, "launcher.lives=0: must be from 1 to 999"),
        ({"lines": ["-p low"]}, "launcher.lines='-p low': must be a list of long options of sbatch"),
        ({"lines": ["--x=a\nb"]}, "launcher.lines='--x=a\\nb': must be a list of long options of sbatch"),
        ({"lines": ["--output=x"]}, "launcher.lines='--output=x': must be without --output, which lowvram chooses"),
        ({"lines": ["--clusters=b"]}, "launcher.lines='--clusters=b': must be without --clusters"),
        (
            {"lines": ["--comment=hf_abcdefghijklmnopqrst"]},
            "launcher.lines='--comment=<refused>': must be without secrets",
        ),
        ({"lines": "--exclusive"}, "launcher.lines='--exclusive': must be a list of texts"),
        ({"partitions": "low"}, "launcher.partitions='low': must be removed: launcher knows partition, gres, time"),
    ):
        with pytest.raises(BadInput) as refused:
            slurm(**values)
        assert str(refused.value).startswith(sentence), refused.value


def test_times_are_read_as_sbatch_reads_them() -> None:
    times = {
        "90": 5400,
        "5:30": 330,
        "4:00:00": 14400,
        "1-12": 129600,
        "1-12:30": 131400,
        "2-0:00:30": 172830,
        None: None,
    }
    assert {time: seconds_of(time) for time in times} == times


def test_a_script_has_what_was_asked_for(tmp_path: Path) -> None:
    lines = ["--constraint=a100", "--exclusive"]
    asked = slurm(partition="low", gres="gpu:2", time=90, account="lab", cpus=4, mem="32G", lines=lines)
    text = script(asked, work(tmp_path / "a b"))
    directives = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert directives == [
        *("--requeue", "--job-name=seed1-0a1b2c3d", "--output=queue_job.log", "--open-mode=append"),
        *("--signal=TERM@120", "--nodes=1", "--ntasks=1", "--partition=low", "--gres=gpu:2", "--time=90"),
        *("--account=lab", "--cpus-per-task=4", "--mem=32G", *lines),
    ]
    assert f"srun --ntasks=1 --cpus-per-task=4 {shlex.join(COMMAND)}\n" in text
    assert f"folder={shlex.quote(str(tmp_path / 'a b'))}\n" in text
    bare = script(slurm(), work(tmp_path))
    assert not any(f"--{name}=" in bare for name in ("partition", "gres", "time", "account", "mem", "cpus-per-task"))


@dataclass(frozen=True)
class Life:
    """How a job's life has ended."""

    code: int
    out: str
    requeued: bool


def live(folder: Path, ends: str, state: str = "RUNNING", lives: int = 3, name: str = "s/0 '$x") -> Life:
    """Run a point's script once.

    Args:
        ends: the shell's words in place of the program.
        state: of the job, as squeue tells it then.
    """
    point, tools = folder / name, folder / "tools"
    point.mkdir(parents=True, exist_ok=True)
    tools.mkdir(exist_ok=True)
    shell = {
        "srun": f'cd {shlex.quote(str(point))}; [ "$1" = --ntasks=1 ] || exit 9; {ends}',
        "squeue": f"echo {state}",
        "scontrol": f"echo $* >> {folder}/requeued",
        "sleep": "exit 0",
    }
    for program, words in shell.items():
        (tools / program).write_text(f"#!/bin/sh\n{words}\n")
        (tools / program).chmod(0o755)
    (folder / "requeued").unlink(missing_ok=True)
    text = script(slurm(lives=lives), work(point))
    env = {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "12"}
    done = subprocess.run(["bash", "-c", text], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    asked = folder / "requeued"
    assert not asked.exists() or asked.read_text() == "requeue 12\n"
    return Life(done.returncode, done.stdout, asked.exists())


def snapshot(step: int) -> str:
    return f"mkdir -p snapshots; touch snapshots/step_{step:09}.{'ab' * 8}.pt"


def test_only_a_job_that_was_stopped_is_queued_again(tmp_path: Path) -> None:
    for code in (0, 1, 3, 137):
        assert live(tmp_path, f"exit {code}", lives=99) == Life(code, "", requeued=False)
    assert live(tmp_path, "exit 75", lives=99) == Life(75, "", requeued=True)
    for state in ("COMPLETING", "CANCELLED", "PREEMPTED"):
        assert not live(tmp_path, "exit 75", state, lives=99).requeued
    assert live(tmp_path, "kill -TERM $PPID; exit 75", lives=99).requeued  # Slurm's signal reaches the shell, too


def test_a_job_is_not_queued_for_ever(tmp_path: Path) -> None:
    """Lives that save nothing are counted anew after each snapshot."""
    for step in (5, 10, 15, 20):
        assert live(tmp_path, f"{snapshot(step)}; exit 75").requeued
    for _ in range(3):
        assert live(tmp_path, "exit 75").requeued
    newest = f"step_{20:09}.{'ab' * 8}.pt"
    given_up = f"given up: 3 lives of this job began at the same snapshot ({newest}) and saved no other\n"
    assert live(tmp_path, "exit 75") == Life(1, given_up, requeued=False)
    for _ in range(2):
        assert live(tmp_path, "exit 75", lives=2, name="measured").requeued
    assert "same snapshot (none)" in live(tmp_path, "exit 75", lives=2, name="measured").out


def test_jobs_that_have_ended_are_left_out() -> None:
    listed = "7|PENDING|seed1-aa\n8|RUNNING|a|b\n9|COMPLETED|seed2\n10|FAILED|x\n11|CANCELLED|x\n12|TIMEOUT|x\n"
    listed += "13|NODE_FAIL|x\n14|PREEMPTED|x\n15|COMPLETING|y\n16|SOMETHING_NEW|z\n\nslurm_load_jobs warning: late\n"
    found = [("7", "seed1-aa", "PENDING"), ("8", "a|b", "RUNNING"), ("15", "y", "COMPLETING")]
    assert jobs_in(listed) == [Queued(*each) for each in [*found, ("16", "z", "SOMETHING_NEW")]]


def test_an_error_of_slurm_is_one_line() -> None:
    assert (
        reason_in("sbatch: error: no\nsbatch: error: no\n\nsbatch: error: Batch job failed\n") == "no; Batch job failed"
    )
    assert reason_in("") == "it says no reason"


def test_a_job_inherits_nothing_of_the_job_that_submits_it() -> None:
    here = {"SLURM_JOB_ID": "3", "SLURM_MEM_PER_NODE": "1", "SRUN_DEBUG": "3", "LOWVRAM_SUBMITTED": "x"}
    stays = {"SLURM_CONF": "/x", "PATH": "/bin", "WANDB_API_KEY": "k", "SBATCH_ACCOUNT": "lab"}
    assert environment({**here, **stays, "HYDRA_FULL_ERROR": "1"}) == stays


def test_a_name_is_one_that_squeue_shows() -> None:
    assert job_name("bf16-lr0.1", "0a1b2c3d") == "bf16-lr0.1-0a1b2c3d"
    assert job_name("a b|'c'\n" + "x" * 200, "0a1b2c3d") == "a_b__c__" + "x" * 43 + "-0a1b2c3d"


@pytest.mark.parametrize(
    ("sbatch", "kind", "sentence"),
    [
        ("echo 12", None, "12"),
        ("echo note; echo '12;lab'", None, "12"),
        ("echo 'sbatch: error: no such account' >&2; exit 1", Refused, "sbatch has refused the job: no such account"),
        (
            "echo 'sbatch: error: Socket timed out' >&2; exit 1",
            Unsure,
            "sbatch says 'Socket timed out': if it has made",
        ),
        ("echo maybe", Unsure, "sbatch has told no job's number but 'maybe': if it has made"),
    ],
)
def test_what_sbatch_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sbatch: str, kind: type[Refused] | None, sentence: str
) -> None:
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\n[ -f queue_job.sh ] || exit 9\n{sbatch}\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "p").mkdir()
    if kind is None:
        assert slurm().submit(work(tmp_path / "p")) == sentence
        return
    with pytest.raises(Refused) as refused:
        slurm().submit(work(tmp_path / "p"))
    assert type(refused.value) is kind
    assert str(refused.value).startswith(f"launcher=slurm: {sentence}")
