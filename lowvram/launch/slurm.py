"""launcher=slurm: batch scripts, sbatch and squeue. Imports no torch.

Slurm decides when and where a job runs. The script runs the program itself, so a point leaves what it leaves
everywhere; what is Slurm's own is how a job ends that was stopped: a job that ends by itself within the grace time of a
preemption is not queued again, so the script asks for that.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from lowvram.config.errors import BadInput, Refused, require
from lowvram.config.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED
from lowvram.config.secret import text_without_secrets
from lowvram.launch.launcher import TOKEN, Queue, Queued, Unsure, Work
from lowvram.results.files.durable import write_text
from lowvram.results.files.run_folder import JOB_LIVES, JOB_LOG, JOB_SCRIPT, SNAPSHOTS

ANSWER_S = 120.0  # the longest that sbatch and squeue may take
SIGNAL_EARLY_S = 60  # Slurm may signal that much earlier than asked
ENDED = frozenset(("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"))
ENDED |= {"PREEMPTED", "REVOKED", "TIMEOUT"}
# Options of sbatch that the script has, or that would make something else of it than one job of one task here.
OURS = frozenset(
    ("job-name", "output", "open-mode", "requeue", "no-requeue", "signal", "chdir", "array", "wrap", "nodes")
)
OURS |= {"ntasks", "clusters", "test-only", "partition", "gres", "time", "account", "cpus-per-task", "mem"}
TIMES = (  # of sbatch's --time, with the seconds of each part
    (r"(\d+)", (60,)),
    (r"(\d+):(\d\d)", (60, 1)),
    (r"(\d+):(\d\d):(\d\d)", (3600, 60, 1)),
    (r"(\d+)-(\d+)", (86400, 3600)),
    (r"(\d+)-(\d+):(\d\d)", (86400, 3600, 60)),
    (r"(\d+)-(\d+):(\d\d):(\d\d)", (86400, 3600, 60, 1)),
)
# What Slurm tells a program of the job that it runs in, which would steer the job that it submits.
OF_A_JOB, STAYS = re.compile(r"SLURM_|SLURMD_|SRUN_"), frozenset(("SLURM_CONF", "SLURM_JWT"))
OF_THIS_PROGRAM = frozenset(("HYDRA_FULL_ERROR", TOKEN))


@final
@dataclass(frozen=True)
class Slurm(Queue):
    """conf/launcher/slurm.yaml."""

    partition: str | None = None
    gres: str | None = None
    time: str | None = None
    account: str | None = None
    cpus: int | None = None
    mem: str | None = None
    grace_s: int = 120
    lives: int = 4
    lines: list[str] = field(default_factory=list)

    label = "Slurm"
    option = "slurm"
    variables = "set it here, as jobs inherit the environment"

    def __post_init__(self) -> None:
        for name, allowed in {
            "partition": "the name of one",
            "gres": "text such as gpu:1",
            "account": "a name",
        }.items():
            value = getattr(self, name)
            is_word = value is None or bool(re.fullmatch(r"[\w.,:=+@/()-]+", value))
            require(is_word, f"launcher.{name}", value, f"null or {allowed}, without blanks")
        require(self.cpus is None or self.cpus >= 1, "launcher.cpus", self.cpus, "null or at least 1")
        is_size = self.mem is None or bool(re.fullmatch(r"\d+[KMGT]?", self.mem))
        require(is_size, "launcher.mem", self.mem, "null or a number with K, M, G or T, such as 32G")
        require(1 <= self.grace_s <= 65535, "launcher.grace_s", self.grace_s, "from 1 to 65535 seconds")
        require(1 <= self.lives <= 999, "launcher.lives", self.lives, "from 1 to 999")
        time_s, least_s = seconds_of(self.time), self.grace_s + SIGNAL_EARLY_S
        allowed = (
            f"more than launcher.grace_s and a minute, which is {least_s} seconds: points are stopped so long before"
        )
        require(time_s is None or time_s > least_s, "launcher.time", self.time, allowed)
        for line in self.lines:
            check_line(line)

    def check(self) -> None:
        for program in ("sbatch", "squeue"):
            if shutil.which(program) is None:
                where = "type this on a machine from which jobs are submitted"
                raise Refused(f"launcher=slurm: there is no {program} on PATH: {where}")

    def submit(self, work: Work) -> str:
        write_text(work.folder / JOB_SCRIPT, script(self, work))
        try:
            said = answer_of(["sbatch", "--parsable", JOB_SCRIPT], work.folder)
        except subprocess.TimeoutExpired:
            raise Unsure(f"launcher=slurm: sbatch hasn't answered within {ANSWER_S:g} s{found_again(work)}") from None
        reason = reason_in(said.stderr)
        if said.returncode and "timed out" in reason:
            raise Unsure(f"launcher=slurm: sbatch says {reason!r}{found_again(work)}")
        if said.returncode:
            raise Refused(f"launcher=slurm: sbatch has refused the job: {reason}")
        job = said.stdout.strip().rpartition("\n")[2].partition(";")[0]
        if not job.isdecimal():
            raise Unsure(f"launcher=slurm: sbatch has told no job's number but {job!r}{found_again(work)}")
        return job

    def jobs(self) -> Sequence[Queued]:
        words = ["squeue", "--noheader", f"--user={os.geteuid()}", "--states=all", "--format=%i|%T|%j"]
        try:
            said = answer_of(words, Path.cwd())
        except subprocess.TimeoutExpired:
            raise Refused(f"launcher=slurm: squeue hasn't answered within {ANSWER_S:g} s: try again later") from None
        if said.returncode:
            reason = reason_in(said.stderr)
            raise Refused(f"launcher=slurm: squeue doesn't tell which jobs there are: {reason}; try again later")
        return jobs_in(said.stdout)


def found_again(work: Work) -> str:
    return f": if it has made a job, squeue shows it as {work.name}, and the same command finds it in the same folder"


def seconds_of(time: str | None) -> float | None:
    """The seconds of a time as sbatch reads it; None: no limit, or the partition's.

    Raises:
        BadInput: sbatch couldn't read it.
    """
    if time is None:
        return None
    for pattern, units in TIMES:
        if match := re.fullmatch(pattern, time):
            return sum(int(part) * unit for part, unit in zip(match.groups(), units, strict=True))
    raise BadInput("launcher.time", time, "null, minutes, or H:MM:SS, D-H, D-H:MM or D-H:MM:SS, such as 4:00:00")


def check_line(line: str) -> None:
    """Raises BadInput for what can't be a further option of sbatch."""
    match = re.fullmatch(r"--([a-z][a-z-]*)(=[^\n\r]*)?", line)
    allowed = "a list of long options of sbatch, such as ['--constraint=a100']"
    require(match is not None, "launcher.lines", line, allowed)
    option = match[1] if match else ""
    require(option not in OURS, "launcher.lines", line, f"without --{option}, which lowvram chooses (launcher.*)")
    is_open = text_without_secrets(line) == line
    require(is_open, "launcher.lines", line, "without secrets: sbatch hands the environment on, so set a variable")


def jobs_in(listed: str) -> list[Queued]:
    """The jobs that wait or run, in what squeue prints. A state that nobody knows is that of a job which lives: else
    its point could run twice."""
    fields = (line.strip().split("|", 2) for line in listed.splitlines())
    jobs = [Queued(each[0], each[2], each[1]) for each in fields if len(each) == len(("id", "state", "name"))]
    return [job for job in jobs if job.state not in ENDED]


def reason_in(stderr: str) -> str:
    """What a command of Slurm's says of an error, in one line."""
    lines = [re.sub(r"^\w+: (error: )?", "", line).strip() for line in stderr.splitlines() if line.strip()]
    return text_without_secrets("; ".join(dict.fromkeys(lines))) or "it says no reason"


def answer_of(words: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """What a command of Slurm's answers. Ctrl-C doesn't reach it: nobody would know whether there is a job."""
    return subprocess.run(
        words,
        cwd=cwd,
        env=environment(os.environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=ANSWER_S,
        start_new_session=True,
    )


def environment(values: Mapping[str, str]) -> dict[str, str]:
    """What a job inherits: all but what is of this program, and of the job that this program runs in."""
    return {
        name: value
        for name, value in values.items()
        if name not in OF_THIS_PROGRAM and (name in STAYS or not OF_A_JOB.match(name))
    }


def options(slurm: Slurm, work: Work) -> list[str]:
    """Those of sbatch, in the order of the script."""
    given = {
        "job-name": work.name,
        "output": JOB_LOG,  # beside the script: sbatch is called there
        "open-mode": "append",  # else the log of the life before would be lost
        "signal": f"TERM@{slurm.grace_s}",
        "nodes": 1,
        "ntasks": 1,
        "partition": slurm.partition,
        "gres": slurm.gres,
        "time": slurm.time,
        "account": slurm.account,
        "cpus-per-task": slurm.cpus,
        "mem": slurm.mem,
    }
    known = [f"--{name}={value}" for name, value in given.items() if value is not None]
    return ["--requeue", *known, *slurm.lines]


def script(slurm: Slurm, work: Work) -> str:
    """The batch script of a point."""
    cpus = "" if slurm.cpus is None else f" --cpus-per-task={slurm.cpus}"  # srun doesn't take it from sbatch
    return SCRIPT.format(
        options="\n".join(f"#SBATCH {option}" for option in options(slurm, work)),
        token_name=TOKEN,
        token=work.token,
        folder=shlex.quote(str(work.folder)),
        cwd=shlex.quote(str(work.cwd)),
        command=shlex.join(work.command),
        srun=f"srun --ntasks=1{cpus}",
        lives=slurm.lives,
        lives_file=JOB_LIVES,
        snapshots=SNAPSHOTS,
        interrupted=EXIT_INTERRUPTED,
        failed=EXIT_FAILED,
    )


SCRIPT = """\
#!/bin/bash
{options}

# Written by lowvram: runs one point, or goes on with it. The log is beside this script.
folder={folder}
export {token_name}={token}

# Whatever ends the lives of this job, it isn't queued for ever: {lives} begin at the same snapshot, and no more.
newest=none
for snapshot in "$folder"/{snapshots}/step_*.[ps]*; do
  [ -e "$snapshot" ] && newest=${{snapshot##*/}}
done
same=$(tail -n {lives} "$folder/{lives_file}" 2>/dev/null | grep -cxF -- "$newest")
if [ "$same" -ge {lives} ]; then
  echo "given up: {lives} lives of this job began at the same snapshot ($newest) and saved no other"
  exit {failed}
fi
echo "$newest" >> "$folder/{lives_file}"

cd {cwd} || exit {failed}
trap : TERM  # Slurm tells this shell, too, which has to outlive the point
{srun} {command}
code=$?

# Stopped, with a snapshot: by its time limit or a preemption, if Slurm still counts the job as running.
if [ $code = {interrupted} ]; then
  for try in 1 2 3 4 5; do
    state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) && break
    sleep 3
  done
  if [ "$state" = RUNNING ] && scontrol requeue "$SLURM_JOB_ID"; then
    sleep 60  # Slurm ends this life
  fi
fi
exit $code
"""
