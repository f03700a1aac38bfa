"""Machines without a home, terminals, descriptors or readable packages, and secrets in their environments."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf.errors import ConfigKeyError

from lowvram.cli.call import Call
from lowvram.cli.main import failed, is_out_of_memory, let_go, told
from lowvram.config import secret
from lowvram.config.cache_folder import cache_folder, state_folder
from lowvram.config.exit_codes import EXIT_FAILED
from lowvram.results import terminal
from tests.calls import ROOT, Outcome

FILLED = (
    "from lowvram.launch.streams import fill_descriptors as fill; import os; fill(); [os.fstat(fd) for fd in range(3)]"
)


def test_a_user_without_home_or_entry_has_a_cache_and_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object = None) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", refuse)
    monkeypatch.delenv("LOWVRAM_CACHE")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert cache_folder().name == f"lowvram-{os.getuid()}"
    assert state_folder() is None


def test_closed_descriptors_are_opened() -> None:
    """Else files and sockets of a run get their numbers."""
    command = f"{sys.executable} -c '{FILLED}' <&- >&- 2>&-"
    assert subprocess.run(["bash", "-c", command], cwd=ROOT, check=False).returncode == 0


def test_a_dumb_terminal_gets_no_escapes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for term, text in (("dumb", ""), ("", ""), ("xterm", "\x1b[?25h\x1b[0m")):
        monkeypatch.setenv("TERM", term)
        terminal.restore_terminal(sys.stdout)
        assert capsys.readouterr().out == text


def test_what_cannot_be_read_is_not_said_to_be_unwritable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    refused = PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path / "package.py"))
    assert "package.py: can't be read (Permission denied): this user needs" in told(refused)
    refused.filename = str(tmp_path / "result.json")
    assert "result.json: can't be written (Permission denied)" in told(refused)
    gone = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    assert told(gone) == "the folder in which this was started is gone: change into another one"


def test_what_libraries_make_of_missing_memory_ends_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    """A parser that gets no memory fails in CPython's own code, and what called it makes an error of a word of it."""
    silent = SystemError("error return without exception set")
    middle, mistake = KeyError("sweep"), ConfigKeyError("hydra.sweep.dir")
    middle.__context__, mistake.__cause__ = silent, middle
    assert is_out_of_memory(mistake)
    assert is_out_of_memory(OSError("could not get source code"))
    assert failed(mistake) == EXIT_FAILED
    assert "gets no more memory" in capsys.readouterr().err
    assert not is_out_of_memory(ConfigKeyError("hydra.sweep.dir"))


def test_a_program_without_memory_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can't be given back for want of memory is given back by the end of the process; the rest is."""
    ended = []

    def no_memory(*_: object, **__: object) -> None:
        ended.append(1)
        raise MemoryError

    call = Call(terminal.progress_for(io.StringIO()))
    monkeypatch.setattr(call.here, "stop", no_memory)
    monkeypatch.setattr("lowvram.cli.main.end_runs", no_memory)
    monkeypatch.setattr(call, "sweep", SimpleNamespace(release=no_memory))
    let_go(call)
    assert len(ended) == 3


def test_secrets_of_the_environment_are_printed_by_nothing(
    call: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither in a refusal nor in what Hydra prints."""
    value = "hunter2hunter2"
    monkeypatch.setenv("MY_API_KEY", value)
    for word in (f"train.steps={value}", f"precision={value}", f"{value}=1", f"callbacks=[{value}.A]", f"seed={value}"):
        done = call(word)
        assert done.code == 3
        assert value not in done.out + done.err
    shown = call("--cfg", "job", f"logger.notes={value}")
    assert value not in shown.out + shown.err
    assert "notes: <refused>" in shown.out
    secret.forget()
