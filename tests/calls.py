"""Calls of the command line as real processes: starting them, finding their processes, reading what they left."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lowvram.results.row import FILE_NAME, Row

ROOT = Path(__file__).parents[1]
FAULTS = ROOT / "tests" / "faults"  # on PYTHONPATH it lets `name=kill@3` and the like act
MARK = "LOWVRAM_TEST_CALL"  # an environment variable that every process of a call inherits
TINY = (
    "model.num_layers=1",
    "model.width=32",
    "model.num_heads=2",
    "data=synthetic",
    "data.sequence_length=16",
    "data.eval_samples=4",
    "train.batch_size=4",
    "train.steps=3",
    "measure.reruns=0",
    "logger=none",
)
TINY_RESNET = (
    "model=resnet",
    "model.layers=[1,1]",
    "model.width=8",
    "data=synthetic",
    "data.image_size=16",
    "data.num_classes=4",
    "data.eval_samples=4",
    "train.batch_size=4",
    "train.steps=3",
    "measure.reruns=0",
    "logger=none",
)


@dataclass(frozen=True)
class Outcome:
    """How a call ended, and what it left below its working folder."""

    code: int
    out: str
    err: str
    cwd: Path

    def said(self) -> str:
        """For the message of a test that fails."""
        return f"exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"

    @property
    def sentence(self) -> str:
        """All that was said by a call that was refused: one line on stderr, with nothing left behind."""
        assert self.code == 3, self.said()
        assert self.out == "", self.said()
        assert re.fullmatch(r"[^\n]+\n", self.err), self.said()
        assert not re.search(r"Traceback|HYDRA_FULL_ERROR|\+?See https", self.err), self.said()
        return self.err.rstrip("\n")

    @property
    def folders(self) -> list[Path]:
        """Of all points, in the order in which they began."""
        found = [file.parent.parent for file in self.cwd.glob("**/.hydra/overrides.yaml")]
        return sorted(found, key=lambda folder: (folder / ".hydra").stat().st_mtime_ns)

    @property
    def folder(self) -> Path:
        """Of the point that began last."""
        return self.folders[-1]

    @property
    def row(self) -> Row:
        """Of the point that began last."""
        return read_row(self.folder)

    @property
    def rows(self) -> dict[str, Row]:
        """Of all points, by name."""
        rows = map(read_row, self.folders)
        return {row["name"]: row for row in rows}

    @property
    def statuses(self) -> dict[str, str]:
        """Of all points, by name."""
        return {name: row["status"] for name, row in self.rows.items()}

    def command(self, label: str) -> list[str]:
        """The words of the command that was printed after `label`, as a shell would hand them to the program."""
        (found,) = re.findall(rf"^{label}: (.*)$", self.out, re.MULTILINE)
        python, program, *words = shlex.split(found)
        assert [python, program] == [sys.executable, str(ROOT / "train.py")]
        return words


def goes_on(outcome: Outcome, call: Callable[..., Outcome]) -> Outcome:
    """After a Ctrl-C among many steps: the row says where, and the printed command makes two more, each once."""
    assert outcome.code == 75, outcome.said()
    assert "Traceback" not in outcome.out + outcome.err
    num_steps = len(history(outcome.folder))
    assert outcome.row["status"] == "interrupted"
    assert outcome.row["reason"] == f"stopped after step {num_steps} of 900", (outcome.row["reason"], num_steps)
    again = call(*outcome.command("continue with"), f"train.steps={num_steps + 2}", "name=null")
    assert again.code == 0, again.said()
    assert [line["step"] for line in history(again.folder) if "loss/train" in line] == list(range(1, num_steps + 3))
    return again


def read_row(folder: Path) -> Row:
    """Of a point's folder."""
    return json.loads((folder / FILE_NAME).read_text(), parse_constant=pytest.fail)  # a NaN is no JSON


def history(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what depends on time and process: all that can be the same twice."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    changing = re.compile("throughput/|time/|memory/|memory_now/|crc32")
    return [{key: value for key, value in line.items() if not changing.match(key)} for line in lines]


@dataclass
class Running:
    """A call that runs, in a process group of its own, as in a terminal."""

    process: subprocess.Popen[str]
    cwd: Path
    mark: str
    lines: list[str] = field(default_factory=list)

    def wait_for(self, text: str) -> None:
        """Until stdout has said `text`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if text in line:
                return
        pytest.fail(f"never said {text!r}: {''.join(self.lines)}\n{self.process.communicate()[1]}")

    def signal_group(self, number: int = signal.SIGINT) -> None:
        """What a terminal does at Ctrl-C: every process gets it."""
        os.killpg(self.process.pid, number)

    def processes(self) -> dict[int, str]:
        """All processes of this call: pid -> command line."""
        mark, found = f"{MARK}={self.mark}".encode(), {}
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdigit() and mark in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
            except OSError:  # it has just ended
                continue
        return found

    def server(self) -> int:
        """The pid of the fork server, once it is there."""
        return wait_until(lambda: next(iter(self._servers()), None), "a fork server")

    def _servers(self) -> list[int]:
        """The fork server, and what it has forked has the same command line: its parent is the program."""
        return [
            pid for pid in children(self.process.pid) if "lowvram.launch.fork_server" in self.processes().get(pid, "")
        ]

    def child(self) -> int:
        """The pid of the point's process, once it is there."""
        return wait_until(lambda: next(iter(children(self.server())), None), "a child")

    def wait_until_gone(self, timeout_s: float = 12) -> None:
        """No process of this call stays."""
        wait_until(lambda: not self.processes(), "the end of all processes", timeout_s)

    def end(self, timeout_s: float = 60) -> Outcome:
        """Wait for the end."""
        out, err = self.process.communicate(timeout=timeout_s)
        return Outcome(self.process.returncode, "".join(self.lines) + (out or ""), err, self.cwd)


def wait_until(condition: Any, what: str, timeout_s: float = 30) -> Any:
    """The first true value of `condition`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.02)
    return value


def children(pid: int) -> list[int]:
    """Of one process; none if it is gone."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def environment() -> dict[str, str]:
    """That of the tests, without what would make another run of it, and with faults on demand. PYTHONPATH stays, as
    packages may be found by it alone."""
    kept = {name: value for name, value in os.environ.items() if not re.match("HYDRA_|PYTHON|WANDB_", name)}
    path = os.pathsep.join(filter(None, [str(FAULTS), os.environ.get("PYTHONPATH")]))
    return {**kept, "PYTHONPATH": path, "WANDB_MODE": "offline", "COLUMNS": "200"}


def begin(*words: str, cwd: Path, env: dict[str, str] | None = None) -> Running:
    """Start `train.py` with these words."""
    mark = secrets.token_hex(8)
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *words],
        cwd=cwd,
        env={**environment(), MARK: mark, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    return Running(process, cwd, mark)


@contextmanager
def killed_at_last(running: list[Running]) -> Iterator[None]:
    """Whatever still runs in the end is killed, also if the test failed."""
    try:
        yield
    finally:
        for call in running:
            for pid in call.processes():
                os.kill(pid, signal.SIGKILL)
            call.process.communicate()
