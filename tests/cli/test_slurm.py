"""launcher=slurm on a real Slurm: whatever ends a job's life, the point goes on, and each row is there once."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.calls import ROOT, TINY, Outcome, history, read_row, wait_until
from tests.cluster import Cluster, cluster
from tests.queued import by_name, job_in, log_of, wait_for_steps

Call = Callable[..., Outcome]
Disturb = Callable[[Cluster, Path], None]
pytestmark = pytest.mark.slow
SLOW = ("seed=5", "name=5.slow", "snapshot.every_steps=5")  # each step takes 0.2 s
SLURM = ("launcher=slurm", "launcher.partition=low", "launcher.cpus=1", "launcher.grace_s=59", "hydra.sweep.dir=s")


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    with cluster() as made:
        yield made


@pytest.fixture
def submit(train: Call, slurm: Cluster) -> Call:
    def run(*words: str) -> Outcome:
        return train("-m", *TINY, *SLURM, *words, env=slurm.env, timeout_s=400)

    return run


def preempt(slurm: Cluster, folder: Path) -> None:
    job = slurm.run("sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive", "--wrap=sleep 3")
    slurm.wait_for(job_in(folder), "PENDING", "REQUEUED")
    slurm.wait_for_end(job)


def run_out_of_time(slurm: Cluster, folder: Path) -> None:
    """The limit is cut so that the rest is less than what a point gets for its snapshot."""
    slurm.run("scontrol", "update", f"JobId={job_in(folder)}", "TimeLimit=1")
    slurm.wait_for(job_in(folder), "PENDING", "REQUEUED")
    slurm.run("scontrol", "update", f"JobId={job_in(folder)}", "TimeLimit=60")


def lose_the_node(slurm: Cluster, folder: Path) -> None:
    node = slurm.about(job_in(folder))["NodeList"]
    slurm.run("scontrol", "update", f"NodeName={node}", "State=down", "Reason=test")
    slurm.wait_for(job_in(folder), "PENDING", "REQUEUED")
    with suppress(AssertionError):  # it has come back by itself
        slurm.run("scontrol", "update", f"NodeName={node}", "State=resume")


def restart_the_controller(slurm: Cluster, folder: Path) -> None:
    slurm.kill("ctld.pid")
    slurm.run("slurmctld")
    wait_until(lambda: answers(slurm) or time.sleep(0.5), "the controller", 60)


def answers(slurm: Cluster) -> bool:
    try:
        return bool(slurm.run("sinfo"))
    except AssertionError:
        return False


@pytest.mark.parametrize(
    ("disturb", "num_steps"),
    # Slurm looks twice a minute who is out of time; the others must still run when the same command is typed again
    [(preempt, 100), (run_out_of_time, 250), (lose_the_node, 100), (restart_the_controller, 400)],
)
def test_a_job_that_is_disturbed_goes_on(
    submit: Call, slurm: Cluster, call: Call, tmp_path: Path, disturb: Disturb, num_steps: int
) -> None:
    steps = f"train.steps={num_steps}"
    first = submit(*SLOW, steps)
    assert first.code == 0, first.said()
    folder = first.folder
    job = job_in(folder)
    assert f"submitted as Slurm job {job}" in first.out
    wait_for_steps(folder, 12)
    disturb(slurm, folder)
    meanwhile = submit(*SLOW, steps)
    assert meanwhile.code == 0, meanwhile.said()
    assert f"Slurm job {job} is " in meanwhile.out
    slurm.wait_for_end(job)
    assert slurm.state(job) == "COMPLETED", log_of(folder)
    collected = submit(*SLOW, steps)
    assert collected.code == 0, collected.said()
    assert job_in(folder) == job
    assert [path.parent for path in tmp_path.glob("s/*/result.json")] == [folder]
    assert read_row(folder)["status"] == "ok"
    lives = (folder / "queue_job.lives").read_text().splitlines()
    assert len(lives) == (1 if disturb is restart_the_controller else 2), log_of(folder)
    assert lives[-1].startswith("none" if disturb is restart_the_controller else "step_")

    alone = call("-m", *TINY, SLOW[0], SLOW[2], steps, "hydra.sweep.dir=alone")
    assert alone.code == 0, alone.said()
    expected = next(path.parent for path in tmp_path.glob("alone/*/result.json"))
    assert history(folder) == history(expected)
    assert read_row(folder)["loss"] == read_row(expected)["loss"]


def test_each_point_is_submitted_once_while_its_job_lives(submit: Call, slurm: Cluster, tmp_path: Path) -> None:
    """A point that can't go on isn't queued again, one that was cancelled is when it is typed again, and a final row
    stays."""
    words = ("seed=1,2,3", "train.steps=4")
    first = submit(*words, "name=2.raise+3.hang@2")
    assert first.code == 0, first.said()
    assert first.out.count("submitted as Slurm job") == 3
    folders = by_name(first)
    jobs = {name: job_in(path) for name, path in folders.items()}
    slurm.wait_for(jobs["seed3"], "RUNNING")
    wait_for_steps(folders["seed3"], 1)
    slurm.wait_for_end(jobs["seed1"])
    slurm.wait_for_end(jobs["seed2"])
    assert slurm.state(jobs["seed1"]) == "COMPLETED"
    assert slurm.about(jobs["seed2"])["Restarts"] == "0"
    assert slurm.state(jobs["seed2"]) == "FAILED"
    slurm.run("scancel", jobs["seed3"])
    slurm.wait_for_end(jobs["seed3"])
    assert slurm.state(jobs["seed3"]) == "CANCELLED"
    assert slurm.about(jobs["seed3"])["Restarts"] == "0"

    again = submit(*words)
    assert again.code == 0, again.said()
    assert "seed1" in again.out[again.out.index("| name") :]
    assert f"seed2: Slurm job {jobs['seed2']} has ended, error: " in again.out
    assert again.out.count("submitted as Slurm job") == 2
    for name in ("seed2", "seed3"):
        slurm.wait_for_end(job_in(folders[name]))
    done = submit(*words)
    assert done.code == 0, done.said()
    assert done.statuses == {"seed1": "ok", "seed2": "ok", "seed3": "ok"}
    assert [read_row(folders[name])["index"] for name in sorted(folders)] == [0, 1, 2]
    assert job_in(folders["seed1"]) == jobs["seed1"]
    assert "submitted" not in done.out


def test_a_single_run(train: Call, slurm: Cluster, tmp_path: Path) -> None:
    words = (*TINY, "launcher=slurm", "train.steps=3", "hydra.run.dir=r")
    outcome = train(*words, env=slurm.env, timeout_s=400)
    assert outcome.code == 0, outcome.said()
    twice = train(*words, env=slurm.env, timeout_s=400)
    assert twice.code in (0, 3), twice.said()  # 3: it runs by now, and holds the folder
    assert "submitted" not in twice.out
    job = job_in(tmp_path / "r")
    slurm.wait_for_end(job)
    assert read_row(tmp_path / "r")["status"] == "ok", log_of(tmp_path / "r")
    longer = train(*TINY, "launcher=slurm", "resume=r", "train.steps=5", env=slurm.env, timeout_s=400)
    assert longer.code == 0, longer.said()
    assert job_in(tmp_path / "r") != job
    slurm.wait_for_end(job_in(tmp_path / "r"))
    assert [line["step"] for line in history(tmp_path / "r") if "loss/train" in line] == [1, 2, 3, 4, 5]


def test_what_slurm_refuses(train: Call, slurm: Cluster, tmp_path: Path) -> None:
    for words in (["-m", "seed=1,2"], ["seed=1"]):
        refused = train(*TINY, *words, "launcher=slurm", "launcher.partition=nope", env=slurm.env, timeout_s=400)
        assert refused.sentence == (
            "launcher=slurm: sbatch has refused the job: invalid partition specified: nope; "
            "Batch job submission failed: Invalid partition name specified"
        )
        assert not list(tmp_path.iterdir())


def test_hydras_own_launcher(train: Call, slurm: Cluster) -> None:
    """It waits for all points; each leaves what it leaves here."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs hydra-submitit-launcher")
    submitit = ("hydra/launcher=submitit_slurm", "hydra.launcher.partition=low", "hydra.launcher.cpus_per_task=1")
    words = ("-m", *TINY, *submitit, "hydra.launcher.timeout_min=30", "seed=1,2", "hydra.sweep.dir=s")
    outcome = train(*words, env=slurm.env, timeout_s=600)
    assert outcome.code == 0, outcome.said()
    assert outcome.statuses == {"seed1": "ok", "seed2": "ok"}


NODES = ("srun", "--partition=low", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=1")
WAYS = {  # as in docs/sharding.md, where both nodes have the address of this machine
    "an agent on each node": "{python} -m torch.distributed.run --nnodes=$SLURM_NNODES --node-rank=$SLURM_NODEID"
    " --nproc-per-node=1 --master-addr=127.0.0.1 --master-port=29517",
    "a task for each rank": "RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=1"
    " MASTER_ADDR=127.0.0.1 MASTER_PORT=29518 exec {python}",
}


@pytest.mark.parametrize("way", WAYS)
def test_one_point_over_two_nodes(call: Call, slurm: Cluster, tmp_path: Path, way: str) -> None:
    words = (*TINY, "mode=train", "train.steps=3", "device=cpu")
    python = WAYS[way].format(python=sys.executable)
    command = f"cd {tmp_path}; {python} {ROOT}/train.py {' '.join(words)} sharding=ddp hydra.run.dir=two"
    slurm.run(*NODES, "bash", "-c", command, timeout_s=400)
    alone = call(*words, "hydra.run.dir=one")
    assert alone.code == 0, alone.said()
    assert read_row(tmp_path / "two")["status"] == "ok"
    two, one = (
        [line["loss/train"] for line in history(tmp_path / name) if "loss/train" in line] for name in ("two", "one")
    )
    assert two == pytest.approx(one, rel=1e-5)
    assert len(two) == 3
