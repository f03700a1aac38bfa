"""What a person sees: a bar in a terminal, few lines elsewhere, a summary, commands that work as typed."""

import io
import os
import pty
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from lowvram.results.row import GIB, empty_row, merge
from lowvram.results.terminal import (
    LiveProgress,
    QuietProgress,
    command_line,
    hydra_quoted,
    progress_for,
    restore_terminal,
    resume_command,
    summary,
    values_text,
)

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"
VALUES = {"loss/train": 2.3456, "throughput/samples_per_s": 9.5, "memory/peak_gib": 0.1234, "lr": 1e-3}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def a_capable_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "160")
    for name in ("TTY_COMPATIBLE", "TTY_INTERACTIVE", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


def test_a_bar_only_where_it_can_move(monkeypatch: pytest.MonkeyPatch):
    assert isinstance(progress_for(Terminal()), LiveProgress)
    assert isinstance(progress_for(io.StringIO()), QuietProgress)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(progress_for(Terminal()), QuietProgress)


def test_the_bar_shows_steps_values_and_times_and_gives_the_cursor_back():
    stream = Terminal()
    progress = LiveProgress(stream)
    progress.start("bf16[red]", 10)
    progress.update(3, VALUES)
    progress.update(4, {"loss/train": 2.0})
    progress.say("a [bold]line")
    progress.stop()
    progress.stop()
    text = stream.getvalue()
    for expected in (
        "bf16[red]",
        "4/10",
        "loss 2, 9.5 samples/s, peak 0.123 GiB",
        "a [bold]line\n",
        "0:00:00",
    ):
        assert expected in text
    assert text.rindex(SHOW) > text.rindex(HIDE)


def test_a_second_point_begins_with_a_clean_bar():
    stream = Terminal()
    progress = LiveProgress(stream)
    progress.start("first", 10)
    progress.update(3, VALUES)
    progress.start("second", None)
    stream.truncate(0)
    progress.update(1, {"loss/train": 7.0})
    progress.stop()
    assert "loss 7" in stream.getvalue()
    assert "samples/s" not in stream.getvalue()
    progress.say("afterwards")
    progress.update(2, VALUES)
    assert stream.getvalue().endswith("afterwards\n")


def test_an_exception_that_nobody_catches_gives_the_cursor_back():
    code = (
        "import sys; from lowvram.results.terminal import progress_for\n"
        "progress = progress_for(sys.stdout); progress.start('point', 10); progress.update(1, {})\n"
        "raise SystemExit(7)"
    )
    text, exit_code = run_in_a_terminal(code)
    assert exit_code == 7
    assert text.count(HIDE) >= 1
    assert text.rindex(SHOW) > text.rindex(HIDE)


def run_in_a_terminal(code: str) -> tuple[str, int]:
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=theirs, stderr=theirs, stdin=theirs)
    os.close(theirs)
    text = b""
    try:
        while data := os.read(ours, 65536):
            text += data
    except OSError:
        pass  # Linux says so when the other side of a terminal is closed
    os.close(ours)
    return text.decode(), process.wait()


def test_only_a_terminal_is_restored():
    terminal, file = Terminal(), io.StringIO()
    restore_terminal(terminal)
    restore_terminal(file)
    assert terminal.getvalue() == SHOW + "\x1b[0m"
    assert file.getvalue() == ""


def test_few_lines_where_there_is_no_terminal():
    stream, now_s = io.StringIO(), [100.0]
    progress = QuietProgress(stream, clock=lambda: now_s[0])
    progress.start("bf16", 200)
    for step in range(1, 101):
        now_s[0] += 0.125
        progress.update(step, VALUES | {"loss/train": float(step)})
    progress.stop()
    first, *others = stream.getvalue().splitlines()
    assert first == "bf16: started, 200 steps"
    assert others == [
        "step 40/200, loss 40, 9.5 samples/s, peak 0.123 GiB, 5 s",
        "step 80/200, loss 80, 9.5 samples/s, peak 0.123 GiB, 10 s",
    ]


def test_lines_that_are_said_are_always_printed():
    stream = io.StringIO()
    progress = QuietProgress(stream)
    progress.start("p", None)
    progress.say("one")
    progress.say("two")
    assert stream.getvalue() == "p: started\none\ntwo\n"


def test_tokens_rather_than_samples():
    text = values_text({"throughput/samples_per_s": 9.5, "throughput/tokens_per_s": 12345.6})
    assert text == "12,346 tokens/s"


def test_the_summary_of_a_point_that_went_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    fields = {
        "name": "bf16",
        "status": "ok",
        "memory": {"peak_bytes": int(0.1234 * GIB), "source": "tensor_ledger"},
        "plan": {"allocated_bytes": 3 * GIB, "fits": False, "least_vram_bytes": 4 * GIB},
        "throughput": {"samples_per_s": 45.678, "tokens_per_s": 1234.5},
        "time": {"step_ms_p50": 12.34, "step_ms_p05": 11.9, "step_ms_p95": 13.0},
        "loss": {"first": 5.5, "last": 2.345678, "eval": 2.5},
        "eval": {"accuracy": 0.75},
        "fidelity": {"gradient_error": 0.00418, "gradient_cosine": 0.9999915, "loss_gap": 0.0123, "steps": 20},
        "disturbed": "another process held 1.000 GiB of the device's memory",
        "semantics_changed": "BatchNorm normalises parts",
    }
    assert summary(merge(empty_row(), fields), tmp_path / "outputs/run") == [
        "bf16: ok",
        "memory: 0.123 GiB peak of live tensor bytes on CPU, planned 3.000 GiB",
        "speed: 45.7 samples/s, 1,234 tokens/s, step 12.34 ms (11.9-13)",
        "loss: first 5.5, last 2.346, eval 2.5",
        "eval: accuracy 0.75",
        "fidelity: gradient error 4.2e-03, cosine 0.999992, loss gap 0.0123 over 20 steps",
        "disturbed: another process held 1.000 GiB of the device's memory",
        "semantics changed: BatchNorm normalises parts",
        "results: outputs/run",
    ]


def test_the_summary_tells_what_moves_and_what_is_reserved_in_vain():
    memory = {"peak_bytes": GIB, "source": "cuda_allocator", "fragmentation_bytes": GIB // 4, "alloc_retries": 2}
    memory |= {"beyond_tensors_bytes": GIB // 2}
    traffic = {"to_host_bytes": 2 * GIB, "to_device_bytes": GIB, "waited_ms": 5.25}
    assert summary(merge(empty_row(), {"status": "ok", "memory": memory, "traffic": traffic})) == [
        "ok",
        "memory: 1.000 GiB peak of the CUDA allocator, 0.250 GiB of fragmentation, 2 allocations tried again, "
        "0.500 GiB more than its tensors were allocated, by kernels, libraries or other threads",
        "moved: 2.000 GiB to the host, 1.000 GiB back a step, waited 5.25 ms",
    ]


def test_the_summary_leaves_out_what_is_unknown():
    row = merge(empty_row(), {"status": "oom", "reason": "out of memory in the backward pass"})
    assert summary(row) == ["oom: out of memory in the backward pass"]


def test_a_run_that_can_continue_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "a run"
    row = merge(empty_row(), {"status": "interrupted"})
    (folder / "snapshots").mkdir(parents=True)
    assert summary(row, folder) == ["interrupted", "results: a run"]
    (folder / "snapshots/step-10").touch()
    assert summary(row, folder)[-1] == f"continue with: {resume_command(folder)}"
    assert not any("continue" in line for line in summary(merge(row, {"status": "ok"}), folder))


@pytest.mark.parametrize(
    "name",
    ["a", "7", "null", "a b/c", "it's", 'say "x"', "x=1,(2)", "$HOME", "back\\slash\\", "ü", "[1]", "a;rm *"],
)
def test_the_resume_command_reaches_hydra_as_meant(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", "import sys; print(sys.argv[1])", "old=1"])
    monkeypatch.setattr(sys, "argv", ["-c", "old=1"])
    typed = resume_command(tmp_path / name).replace("python", shlex.quote(sys.executable), 1)
    word = subprocess.run(typed, shell=True, capture_output=True, text=True, check=True).stdout[:-1]
    (override,) = OverridesParser.create().parse_overrides([word])
    assert (override.key_or_group, override.value()) == ("resume", name)


def test_the_program_is_named_as_it_was_typed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "orig_argv", ["/my venv/python", "train.py", "-m", "ckpt=every1"])
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", "ckpt=every1"])
    assert command_line("resume=last") == "'/my venv/python' train.py resume=last"


def test_a_plain_path_is_not_quoted():
    assert hydra_quoted("outputs/2025-01-01/12-00-00") == "outputs/2025-01-01/12-00-00"
