"""A real Slurm for tests: munge, slurmctld and two logical nodes on this machine, in a folder of its own."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.calls import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "srun")
PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))  # where Debian has the daemons
NODES = ("n1", "n2")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")
CONFIGURATION = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthInfo=cred_expire=5,socket={folder}/munge/socket
StateSaveLocation={folder}/ctld
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/%n.log
SlurmctldPort={ports[0]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=5
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 State=UNKNOWN
PartitionName=low  Nodes=n[1-2] Default=YES MaxTime=60 State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
PartitionName=high Nodes=n[1-2] MaxTime=60 State=UP PriorityTier=10 PreemptMode=OFF
"""


@dataclass(frozen=True)
class Cluster:
    """A cluster that runs. Its low partition is preempted by the high one, with 30 s of grace; a job that is queued
    again waits for 6 s."""

    folder: Path

    @property
    def env(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": PATH}

    def run(self, *words: str, timeout_s: float = 60) -> str:
        """What a command of Slurm's prints."""
        env = {**os.environ, **self.env}
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout.strip()

    def about(self, job: str) -> dict[str, str]:
        """What Slurm knows of a job."""
        pairs = (word.partition("=") for word in self.run("scontrol", "--oneliner", "show", "job", job).split())
        return {name: value for name, _, value in pairs}

    def state(self, job: str) -> str:
        return self.about(job)["JobState"]

    def wait_for(self, job: str, *states: str, timeout_s: float = 400) -> None:
        def is_there() -> bool:
            time.sleep(0.5)
            state = self.state(job)
            assert state in states or state not in ENDED, f"job {job} has ended: {state}"
            return state in states

        wait_until(is_there, f"job {job} being {' or '.join(states)}", timeout_s)

    def wait_for_end(self, job: str, timeout_s: float = 900) -> None:
        self.wait_for(job, *ENDED, timeout_s=timeout_s)

    def start_controller(self, *flags: str) -> None:
        self.run("slurmctld", *flags)
        wait_until(lambda: self.is_up() or time.sleep(0.5), "both nodes", 60)

    def is_up(self) -> bool:
        with suppress(AssertionError):
            return self.run("sinfo", "--noheader", "--Node", "--partition=low", "--format=%t").split() == ["idle"] * 2
        return False

    def kill(self, name: str) -> None:
        """End one of the daemons at once, by its file with its pid."""
        with suppress(OSError, ValueError):
            pid = int((self.folder / name).read_text())
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not Path(f"/proc/{pid}").exists() or is_dead(pid), "a daemon's end")


def is_dead(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def missing() -> str | None:
    """Why there can be no cluster here; None if there can be one."""
    absent = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    if absent:
        return f"no real Slurm here: {', '.join(absent)} missing (apt-get install slurm-wlm munge)"
    return None if os.geteuid() == 0 else "no real Slurm here: its daemons are started as root"


@contextmanager
def cluster() -> Iterator[Cluster]:
    """A cluster of two nodes with two processors each; skips the test where there can be none."""
    if (why := missing()) is not None:
        pytest.skip(why)
    folder = Path(tempfile.mkdtemp(prefix="lowvram-slurm-", dir="/tmp"))  # a socket's path has to be short
    made = Cluster(folder)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for name in ("ctld", "munge", *NODES):
            (folder / name).mkdir()
        ports = free_ports(3)
        (folder / "slurm.conf").write_text(
            CONFIGURATION.format(host=socket.gethostname().partition(".")[0], folder=folder, ports=ports)
        )
        start_munge(made)
        stack.callback(made.kill, "munge/pid")
        stack.callback(stop_slurm, made)
        made.run("slurmctld", "-c")
        for node in NODES:
            made.run("slurmd", "-N", node)
        wait_until(lambda: made.is_up() or time.sleep(0.5), "both nodes", 60)
        yield made


def start_munge(made: Cluster) -> None:
    folder = made.folder / "munge"
    (folder / "key").write_bytes(secrets.token_bytes(1024))
    (folder / "key").chmod(0o600)
    made.folder.chmod(0o711)
    folder.chmod(0o711)
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    made.run("munged", "--force", *(f"--{flag}={folder / name}" for flag, name in files.items()))


def stop_slurm(made: Cluster) -> None:
    """Cancel all jobs, then end the daemons."""
    with suppress(AssertionError, subprocess.TimeoutExpired):
        made.run("scancel", "--user=root", timeout_s=20)
        with suppress(AssertionError):
            wait_until(lambda: not made.run("squeue", "--noheader") or time.sleep(0.5), "the end of all jobs", 30)
        made.run("scontrol", "shutdown", timeout_s=20)
        time.sleep(1)
    for name in ("ctld.pid", *(f"{node}.pid" for node in NODES)):
        made.kill(name)
    for pid in leftovers(made):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def leftovers(made: Cluster) -> list[int]:
    """What still runs of the cluster's jobs, told by the configuration in its environment."""
    mark, found = f"SLURM_CONF={made.env['SLURM_CONF']}".encode(), list[int]()
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdigit() and mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return [pid for pid in found if pid != os.getpid()]


def free_ports(num: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
