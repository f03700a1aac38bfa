"""Calls of the command line, for every test that needs one.

`train` starts `train.py` as a user would: some 3 seconds a call. `call` is for the many: the same program, but its
parent lives in pytest and all calls share one fork server, so a call costs a fraction of a second.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lowvram import cli, identity
from lowvram.process.client import Server
from lowvram.results.row import FILE_NAME, Row

ROOT = Path(__file__).parents[1]
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
    "logger=none",
)


@dataclass(frozen=True)
class Outcome:
    """How a call of the command line ended, and what it left below its working folder."""

    code: int
    out: str
    err: str
    cwd: Path

    @property
    def sentence(self) -> str:
        """All that was said, of a call that was refused: one line on stderr, nothing else."""
        assert self.out == ""
        assert self.err.endswith("\n")
        assert self.err.count("\n") == 1, self.err
        assert "Traceback" not in self.err
        return self.err.rstrip("\n")

    @property
    def folders(self) -> list[Path]:
        """Of all points, the newest last."""
        found = self.cwd.glob("**/.hydra/overrides.yaml")
        return [file.parent.parent for file in sorted(found, key=lambda file: file.stat().st_mtime_ns)]

    @property
    def folder(self) -> Path:
        """Of the newest point."""
        return self.folders[-1]

    @property
    def row(self) -> Row:
        """Of the newest point."""
        return read_row(self.folder)

    @property
    def rows(self) -> dict[str, Row]:
        """Of all points, by name."""
        rows = [read_row(folder) for folder in self.folders]
        return {row["name"]: row for row in rows}

    def said(self) -> str:
        """For messages of failing tests."""
        return f"exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


def read_row(folder: Path) -> Row:
    """Strict JSON: a NaN is a failure."""
    return json.loads((folder / FILE_NAME).read_text(), parse_constant=pytest.fail)


def losses(folder: Path) -> list[tuple[int, float]]:
    """The training loss of every step, as metrics.jsonl has it."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss/train"]) for line in lines if "loss/train" in line]


@dataclass
class Running:
    """A call of the command line that runs, in a process group of its own."""

    process: subprocess.Popen[str]
    cwd: Path
    mark: str
    said: list[str] = field(default_factory=list)

    def wait_for(self, text: str, timeout: float = 60) -> None:
        """Until stdout has said `text`."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            line = self.process.stdout.readline()
            self.said.append(line)
            if text in line:
                return
            assert line, f"ended without saying {text!r}: {''.join(self.said)}"
        pytest.fail(f"{text!r} was not said in {timeout} s")

    def signal_group(self, number: int = signal.SIGINT) -> None:
        """What a terminal does at Ctrl-C: every process of the foreground gets it."""
        os.killpg(self.process.pid, number)

    def processes(self) -> dict[int, str]:
        """All processes of this call that are alive: pid -> command line, or "child" for a fork of the server."""
        mark, found = f"{MARK}={self.mark}".encode(), {}
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdigit() and mark in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
            except OSError:  # it has just ended
                continue
        return found

    def server(self) -> int:
        """The pid of the fork server."""
        servers = [pid for pid, words in self.processes().items() if "lowvram.process.server" in words]
        return min(servers)

    def child(self) -> int:
        """The pid of the point's process."""
        (pid,) = children(self.server())
        return pid

    def wait_until_gone(self, timeout: float = 12) -> None:
        """No process of this call stays."""
        deadline = time.monotonic() + timeout
        while left := self.processes():
            assert time.monotonic() < deadline, f"still there after {timeout} s: {left}"
            time.sleep(0.05)

    def end(self, timeout: float = 60) -> Outcome:
        """Wait for the end."""
        out, err = self.process.communicate(timeout=timeout)
        return Outcome(self.process.returncode, "".join(self.said) + out, err, self.cwd)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Starts `train.py` with the words given, in `tmp_path`; whatever still runs at the end of the test is killed."""
    running: list[Running] = []

    def begin(*words: str, cwd: Path = tmp_path, env: dict[str, str] | None = None) -> Running:
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
        running.append(Running(process, cwd, mark))
        return running[-1]

    yield begin
    for call in running:
        for pid in call.processes():
            os.kill(pid, signal.SIGKILL)
        call.process.communicate()


@pytest.fixture
def train(start: Callable[..., Running]) -> Callable[..., Outcome]:
    """Runs `train.py` with the words given, in `tmp_path`, to its end."""

    def run(*words: str, timeout: float = 60, **kwargs: Any) -> Outcome:
        return start(*words, **kwargs).end(timeout)

    return run


def environment() -> dict[str, str]:
    """That of the tests, without what would make a run another one."""
    others = ("HYDRA_FULL_ERROR", "PYTHONPATH", "PYTHONWARNINGS")
    env = {name: value for name, value in os.environ.items() if name not in others and not name.startswith("WANDB")}
    return {**env, "WANDB_MODE": "offline", "COLUMNS": "200"}


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


@dataclass
class Borrowed:
    """The shared server, as one call sees it: not to be stopped by it."""

    run: Callable[..., Any]

    def stop(self) -> None:
        pass


@pytest.fixture
def call(
    tmp_path: Path, shared_server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Outcome]]:
    """Like `train`, in a fraction of the time. Paths among the words must be absolute: the children live elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr(cli, "Server", lambda: Borrowed(shared_server.run))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(*words: str) -> Outcome:
        identity.started.cache_clear()
        monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # so that it is as it was afterwards
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return Outcome(ended.value.code or 0, said.out, said.err, tmp_path)

    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


__all__ = ["TINY", "TINY_RESNET", "Outcome", "Running", "children", "dataclasses", "losses", "read_row"]
