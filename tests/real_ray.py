"""A real Ray for tests: a head and a second node on this machine, with cards that don't exist, in a folder of their
own. Ray is installed into an environment of its own, as its pins clash with ours."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.calls import ROOT, environment, wait_until
from tests.cluster import free_ports

REQUIREMENT = "ray[default]==2.60.0"
INSTALL_S, START_S, END_S = 1800, 600, 900
NUM_TRIES = 4
MARK = "LOWVRAM_REAL_RAY"  # in the environment of all that a node starts: the folder and the node's name
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
FOR_ALL = ("--disable-usage-stats", "--object-store-memory=80000000")


@dataclass(frozen=True)
class Cluster:
    """A cluster that runs, and asks for a token. Its head, "first", has two processors and two cards; "second" has one
    of each. Jobs find a node by the resource of its name."""

    folder: Path
    ray: Path
    ports: list[int]
    token: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.ports[1]}"

    @property
    def env(self) -> dict[str, str]:
        """What a user sets who submits jobs."""
        return {"RAY_API_SERVER_ADDRESS": self.address, "RAY_AUTH_TOKEN": self.token}

    def start(self, node: str, *flags: str) -> None:
        kept = {name: value for name, value in environment().items() if not name.startswith("RAY_")}
        ours = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token, MARK: self.mark(node), "OMP_NUM_THREADS": "1"}
        ours["RAY_health_check_timeout_ms"] = "60000"  # others may take the processors
        words = [str(self.ray), "start", *flags, *FOR_ALL, f"--resources={json.dumps({node: 1})}"]
        said = ""
        for _ in range(NUM_TRIES):  # a node gives up if others take the processors for 30 s
            done = subprocess.run(
                words, env={**kept, **ours}, capture_output=True, text=True, timeout=START_S, check=False, cwd="/"
            )
            if done.returncode == 0:
                return
            said = f"{done.stdout}{done.stderr}"
            self.lose(node)
        pytest.fail(f"{node} hasn't started: {said}")

    def start_head(self) -> None:
        gcs, dashboard, agent, client = self.ports
        ports = [f"--port={gcs}", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"]
        self.start(
            "first", "--head", *ports, f"--ray-client-server-port={client}", "--num-cpus=2", "--num-gpus=2",
            f"--temp-dir={self.folder}",
        )  # fmt: skip
        wait_until(lambda: self.is_up() or time.sleep(0.5), "the dashboard of Ray", START_S)

    def start_second(self) -> None:
        self.start("second", f"--address=127.0.0.1:{self.ports[0]}", "--num-cpus=1", "--num-gpus=1")

    def mark(self, node: str) -> str:
        """Begins that of all nodes if `node` is empty."""
        return f"{self.folder}/{node}"

    def is_up(self) -> bool:
        with suppress(OSError):
            return isinstance(self.ask("/api/jobs/"), list)
        return False

    def ask(self, path: str, method: str = "GET") -> Any:
        request = Request(f"{self.address}{path}", method=method, headers={"Authorization": f"Bearer {self.token}"})
        with urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def state(self, job: str) -> str:
        return self.ask(f"/api/jobs/{job}")["status"]

    def stop(self, job: str) -> None:
        """As `ray job stop`."""
        assert self.ask(f"/api/jobs/{job}/stop", "POST") == {"stopped": True}

    def wait_for_end(self, job: str) -> str:
        """The state in which a job ends."""

        def ended() -> str | None:
            time.sleep(0.5)
            state = self.state(job)
            return state if state in ENDED else None

        return wait_until(ended, f"the end of job {job}", END_S)

    def processes(self, mark: str) -> dict[int, str]:
        """All that a node has started, told by its environment: pid -> command line."""
        wanted, found = f"{MARK}={mark}".encode(), dict[int, str]()
        for folder in Path("/proc").iterdir():
            with suppress(OSError):
                if folder.name.isdigit() and wanted in (folder / "environ").read_bytes():
                    found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        return {pid: line for pid, line in found.items() if pid != os.getpid()}

    def lose(self, node: str = "") -> None:
        """End the processes of Ray on a node, and those of its jobs, at once, as if the machine were gone; without a
        name on all nodes."""
        while alive := self.processes(self.mark(node)):
            for pid in alive:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)


def ray_command() -> Path:
    """The command of Ray in an environment of its own, which the first test makes; skips the test where it can't."""
    folder = ROOT / ".pytest_cache" / "ray"
    command, done = folder / "bin" / "ray", folder / "done"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists() or done.read_text() != REQUIREMENT:
            venv.create(folder, with_pip=True, clear=False)
            words = [str(folder / "bin" / "pip"), "install", "--quiet", REQUIREMENT]
            installed = subprocess.run(words, capture_output=True, text=True, timeout=INSTALL_S, check=False)
            if installed.returncode:
                pytest.skip(f"no real Ray here: pip can't install {REQUIREMENT}: {installed.stderr.strip()[-200:]}")
            done.write_text(REQUIREMENT)
    return command


@contextmanager
def cluster() -> Iterator[Cluster]:
    """A cluster of one node, to which `start_second` adds another."""
    if sys.platform != "linux":
        pytest.skip("no real Ray here: its processes are told by /proc")
    ray = ray_command()
    folder = Path(tempfile.mkdtemp(prefix="lowvram-ray-", dir="/tmp"))  # a socket's path has to be short
    made = Cluster(folder, ray, free_ports(4))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.callback(made.lose)
        made.start_head()
        yield made
