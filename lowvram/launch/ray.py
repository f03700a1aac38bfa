"""launcher=ray: each point is a job of a Ray cluster. Imports neither Ray nor torch.

Ray decides on which node a job runs, and hands it cards and cores. The job runs the program itself, so a point leaves
what it leaves everywhere. Ray never starts a job again: what has ended without a final row is submitted again when the
command is typed again.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final
from urllib.parse import quote

from lowvram.config.errors import Refused, require
from lowvram.config.exit_codes import EXIT_FAILED
from lowvram.config.secret import is_secret, text_without_secrets
from lowvram.config.settings import parse_bytes
from lowvram.launch.launcher import TOKEN, Queue, Queued, Unsure, Work
from lowvram.launch.ray_api import Answer, Silent, address_from, ask, denial, is_address, one_line
from lowvram.results.files.durable import write_text
from lowvram.results.files.run_folder import JOB_LOG, JOB_SCRIPT

JOBS = "/api/jobs/"
OK, NOT_FOUND, INTERNAL_ERROR = 200, 404, 500
REFUSALS = range(300, 500)
ENDED = frozenset(("SUCCEEDED", "FAILED", "STOPPED"))
STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"  # in a job's environment: from its SIGTERM until Ray kills it
RESERVED = ("CPU", "GPU", "memory", "object_store_memory")  # resources that Ray takes by other names


@final
@dataclass(frozen=True)
class Ray(Queue):
    """conf/launcher/ray.yaml."""

    address: str | None = None
    num_gpus: float = 1.0
    num_cpus: float = 1.0
    memory: str | None = None
    resources: list[str] = field(default_factory=list)
    grace_s: int = 120
    env: list[str] = field(default_factory=list)

    label = "Ray"
    option = "ray"
    variables = "name it in launcher.env, or set it where Ray is started on the nodes"

    def __post_init__(self) -> None:
        allowed = "null or the address of the cluster's dashboard, such as http://HEAD:8265"
        require(self.address is None or is_address(self.address), "launcher.address", self.address, allowed)
        is_number = 0 <= self.num_gpus <= 1 or (self.num_gpus > 0 and self.num_gpus == int(self.num_gpus))
        require(is_number, "launcher.num_gpus", self.num_gpus, "from 0 to 1, or a whole number")
        require(self.num_cpus >= 0, "launcher.num_cpus", self.num_cpus, "at least 0")
        for text in self.resources:
            amount_of(text)
        is_some = bool(self.num_gpus or self.num_cpus or self.memory or self.resources)
        allowed = "above 0 where a job asks for nothing else: Ray would start all jobs at once, on its head"
        require(is_some, "launcher.num_cpus", self.num_cpus, allowed)
        require(1 <= self.grace_s <= 86400, "launcher.grace_s", self.grace_s, "from 1 to 86400 seconds")
        parse_bytes("launcher.memory", self.memory)

    def check(self) -> None:
        address = self._address()
        self._variables()
        try:
            answer = ask(address, "/api/version")
        except Silent as silent:
            how = "start Ray with its dashboard, or type launcher.address=http://HEAD:8265"
            raise Refused(f"launcher=ray: nothing answers at {address}: {silent}; {how}") from None
        if answer.status != OK:
            raise denial(address, answer)
        value = answer.value()
        if not isinstance(value, Mapping) or "ray_version" not in value:
            how = "type launcher.address=http://HEAD:8265"
            raise Refused(f"launcher=ray: what answers at {address} isn't the dashboard of a Ray cluster: {how}")

    def submit(self, work: Work) -> str:
        write_text(work.folder / JOB_SCRIPT, script(self, work))
        try:
            answer = ask(self._address(), JOBS, self._request(work))
        except Silent as silent:
            if not silent.was_heard:
                raise Refused(f"launcher=ray: nothing answers at {self._address()}: {silent}") from None
            return self._found(work, None, str(silent))
        if answer.status == OK and is_about(answer, work.name):
            return work.name
        if answer.status in REFUSALS:
            raise denial(self._address(), answer)
        return self._found(work, answer, answer.reason())

    def jobs(self) -> Sequence[Queued]:
        try:
            answer = ask(self._address(), JOBS)
        except Silent as silent:
            what = f"nothing answers at {self._address()}: {silent}"
            raise Refused(f"launcher=ray: {what}; so nobody knows which jobs there are: try again later") from None
        if answer.status != OK:
            raise denial(self._address(), answer)
        listed = answer.value()
        if not isinstance(listed, list):
            raise Refused(f"launcher=ray: {self._address()} doesn't tell which jobs there are: try again later")
        return jobs_in(listed)

    def how_ended(self, job: str) -> str:
        try:
            value = ask(self._address(), f"{JOBS}{quote(job, safe='')}").value()
        except (Silent, Refused):
            return ""
        if not isinstance(value, Mapping):
            return ""
        said = str(value.get("message") or "").partition("\n")[0].partition(", last available logs")[0]
        return one_line(": ".join(filter(None, [str(value.get("status") or ""), said])))

    def _address(self) -> str:
        return address_from(os.environ) if self.address is None else self.address.rstrip("/")

    def _request(self, work: Work) -> dict[str, Any]:
        """What Ray is to run, in the words of its API."""
        asked = {
            "entrypoint_num_cpus": self.num_cpus,
            "entrypoint_num_gpus": self.num_gpus,
            "entrypoint_memory": parse_bytes("launcher.memory", self.memory),
            "entrypoint_resources": dict(map(amount_of, self.resources)),
        }
        return {
            "submission_id": work.name,
            "entrypoint": entrypoint(work),
            "runtime_env": {"env_vars": {**self._variables(), TOKEN: work.token, STOP_WAIT: str(self.grace_s)}},
            **{name: value for name, value in asked.items() if value},  # older versions of Ray don't know all
        }

    def _variables(self) -> dict[str, str]:
        """Those of this environment that jobs get. Raises BadInput for one that isn't set, and for a secret: whoever
        may open the dashboard can read them."""
        for name in self.env:
            value = os.environ.get(name)
            require(value is not None, "launcher.env", [name], "a list of variables that are set here")
            is_open = not is_secret(name, value) and text_without_secrets(str(value)) == value
            allowed = "without secrets, as the dashboard shows them: set it where Ray is started on the nodes"
            require(is_open, "launcher.env", [name], allowed)
        return {name: os.environ[name] for name in self.env}

    def _found(self, work: Work, answer: Answer | None, reason: str) -> str:
        """After an answer that doesn't say whether there is a job: ask for it.

        Raises:
            Refused: there is none, and none will come.
            Unsure: that isn't known.
        """
        try:
            now = ask(self._address(), f"{JOBS}{quote(work.name, safe='')}")
        except (Silent, Refused):
            now = None
        if now is not None and now.status == OK and is_about(now, work.name):
            return work.name
        if answer is not None and answer.status == INTERNAL_ERROR and now is not None and now.status == NOT_FOUND:
            raise denial(self._address(), answer)
        found = f"if it has made a job, Ray shows it as {work.name}, and the same command finds it in the same folder"
        raise Unsure(f"launcher=ray: {self._address()} hasn't said whether it takes the job: {reason}; {found}")


def amount_of(text: str) -> tuple[str, float]:
    """The name and the number of a resource; raises BadInput for what is none."""
    match = re.fullmatch(r"([^\s:][^\s]*):(\d+(\.\d*)?|\.\d+)", text)
    allowed = "a list of NAME:NUMBER, such as [a100:1], with numbers above 0"
    require(match is not None and float(match[2]) > 0, "launcher.resources", [text], allowed)
    name, number = (match[1], float(match[2])) if match else ("", 0.0)
    allowed = f"without {name}: type launcher.num_cpus, launcher.num_gpus or launcher.memory"
    require(name not in RESERVED, "launcher.resources", [text], allowed)
    return name, number


def is_about(answer: Answer, name: str) -> bool:
    """Whether an answer is that of Ray about a job."""
    value = answer.value()
    return isinstance(value, Mapping) and value.get("submission_id") == name


def jobs_in(listed: Sequence[Any]) -> list[Queued]:
    """The jobs that wait or run, in Ray's list, which also has programs that nobody submitted. A state that nobody
    knows is that of a job which lives: else its point could run twice."""
    named = [each for each in listed if isinstance(each, Mapping) and isinstance(each.get("submission_id"), str)]
    jobs = [Queued(each["submission_id"], each["submission_id"], one_line(str(each.get("status")))) for each in named]
    return [job for job in jobs if job.state not in ENDED]


def entrypoint(work: Work) -> str:
    """The command of a job: runs the point's script, if the node sees it. Says nothing that was typed, as the
    dashboard shows it."""
    path = shlex.quote(str(work.folder / JOB_SCRIPT))
    blind = f"this node doesn't see {work.folder}: the folder of a point must be on storage that all nodes share"
    otherwise = f'echo "$(uname -n):" {shlex.quote(blind)}; exit {EXIT_FAILED}'
    return f"if [ -r {path} ]; then exec bash {path}; else {otherwise}; fi"


def script(ray: Ray, work: Work) -> str:
    """The script of a point."""
    return SCRIPT.format(
        folder=shlex.quote(str(work.folder)),
        token_name=TOKEN,
        token=work.token,
        name=work.name,
        log=JOB_LOG,
        failed=EXIT_FAILED,
        cwd=shlex.quote(str(work.cwd)),
        cards="export CUDA_VISIBLE_DEVICES=  # Ray hides no card from who asks for none\n" if ray.num_gpus == 0 else "",
        command=shlex.join(work.command),
    )


SCRIPT = """\
#!/bin/bash
# Written by lowvram: runs one point, or goes on with it. Ray starts it on a node; the log is beside this script.
folder={folder}
if [ "${token_name}" != {token} ]; then
  echo "this job isn't the newest of $folder: it runs nothing"
  exit {failed}
fi
echo "the log is $folder/{log}"
exec >> "$folder/{log}" 2>&1 || exit {failed}
{cards}echo "Ray job {name} on $(uname -n), CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES"
cd {cwd} || exit {failed}
unset PYTHONBREAKPOINT  # Ray sets a debugger of its own, which isn't installed here
exec {command}
"""
