"""Every way in which a point can end: its row, the exit code, the points after it, its run in W&B.

One sweep holds most faults, each in a point of its own (see tests/faults/faults.py); a sound point comes last.
"""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lowvram.config.texts import LONGEST_LINE, LONGEST_REASON
from lowvram.launch.client import Server
from lowvram.launch.native_log import LARGEST_BYTES
from lowvram.results.row import KINDS, Status
from tests.calls import TINY, Outcome, Running, begin, children, history, killed_at_last, wait_until
from tests.tiers import first_of

Call = Callable[..., Outcome]
Start = Callable[..., Running]

# Before step 2 of the point with seed 1, 2, ... -> its status, a part of its reason
FAULTS = {
    "raise": ("error", "ValueError: the model is broken"),
    "sys_exit": ("error", "the program called sys.exit(5)"),
    "segfault": ("error", "the process died of SIGSEGV (see native.log)"),
    "exit17": ("error", "the process ended by itself with exit code 17"),
    "kill": ("killed", "the process died of SIGKILL"),
    "bad_alloc": (
        "oom",
        "out of memory in native code (see native.log); activations are 56 % of the peak: try ckpt=every1 or accum=x4",
    ),
    "kill_server": ("killed", "the process that starts points has died"),
}
NUM_POINTS = len(FAULTS) + 1


@pytest.fixture(scope="module")
def faulty_sweep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Outcome, Running]]:
    """Every fault once, then a point without any."""
    name = "name=" + "+".join(f"{seed}.{fault}" for seed, fault in enumerate(FAULTS, start=1))
    call = begin("-m", *TINY, f"seed=range(1,{NUM_POINTS + 1})", name, cwd=tmp_path_factory.mktemp("faults"))
    with killed_at_last([call]):
        yield call.end(120), call


@pytest.mark.parametrize(("number", "fault"), list(enumerate(FAULTS, start=1)))
def test_a_fault_is_reported_in_the_row(faulty_sweep: tuple[Outcome, Running], number: int, fault: str) -> None:
    row, (status, reason) = faulty_sweep[0].rows[f"seed{number}"], FAULTS[fault]
    assert row["status"] == status, row["reason"]
    assert reason in row["reason"]
    assert row["index"] == number - 1
    assert row["provenance"]["threads"] >= 1  # what the child has said before it died is kept


def test_the_other_points_run(faulty_sweep: tuple[Outcome, Running]) -> None:
    outcome, _ = faulty_sweep
    assert len(outcome.folders) == NUM_POINTS
    assert outcome.statuses[f"seed{NUM_POINTS}"] == "ok"
    assert outcome.code == 1


def test_a_traceback_is_shown_only_for_what_raised(faulty_sweep: tuple[Outcome, Running]) -> None:
    outcome, _ = faulty_sweep
    raised = [row["reason"].partition(":")[0] for row in outcome.rows.values() if "Error: " in (row["reason"] or "")]
    assert raised == ["ValueError"]
    assert outcome.out.count("Traceback") == 2  # sys.exit raises too
    assert outcome.err == ""


def test_every_failure_is_named_at_the_end(faulty_sweep: tuple[Outcome, Running]) -> None:
    outcome, _ = faulty_sweep
    table = outcome.out.partition("+----")[2]
    for number, fault in enumerate(FAULTS, start=1):
        assert f"seed{number}: {FAULTS[fault][0]}: " in table
    assert outcome.command("to run what is missing")[-1].startswith("hydra.sweep.dir=outputs/sweeps/")


def test_no_process_stays(faulty_sweep: tuple[Outcome, Running]) -> None:
    faulty_sweep[1].wait_until_gone()


def wandb_records(folder: Path) -> list[dict[str, Any]]:
    """What W&B's own reader finds in a point's folder."""
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [json.loads(line) for line in lines]


def wandb_run(folder: Path) -> tuple[dict[str, str], int]:
    """Of it: the summary and the exit code."""
    records = wandb_records(folder)
    summary: dict[str, str] = {}
    for record in records:
        summary |= record.get("summary", {}).get("update", {})
    (exit_code,) = [record["exit"]["exit_code"] for record in records if record["type"] == "exit"]
    return summary, exit_code


@pytest.mark.parametrize("fault", first_of(["kill", "bad_alloc", "raise", None]))
@pytest.mark.slow
def test_the_run_in_wandb_is_marked(call: Call, fault: str | None) -> None:
    outcome = call(*TINY, "logger=wandb", f"name={fault or 'null'}")
    summary, exit_code = wandb_run(outcome.folder)
    assert exit_code == (fault is not None)
    assert summary["status"] == outcome.row["status"] == (FAULTS[fault][0] if fault else "ok")
    assert summary.get("reason") == outcome.row["reason"]


@pytest.mark.slow
def test_running_out_of_memory_is_reported_with_advice(call: Call) -> None:
    """For real: under a cap, in a model that would need more."""
    outcome = call(*TINY, "train.batch_size=256", "data.sequence_length=64", "vram=24MiB")
    assert outcome.code == 1
    row = outcome.row
    assert row["status"] == "oom"
    assert row["reason"].startswith("out of memory in the forward pass, asking for ")
    assert "activations are " in row["reason"]
    assert "% of the peak: try ckpt=every1 or accum=x8" in row["reason"]
    assert set(row["plan"]["by_kind"]) == set(KINDS)
    assert row["plan"]["by_kind"]["activations"] > 24 * 2**20
    assert row["plan"]["allocated_bytes"] == sum(row["plan"]["by_kind"].values())
    assert row["choices"]["allocator"] == "tight"
    assert row["reason"] in outcome.out


@pytest.mark.slow
def test_what_is_advised_can_be_had(call: Call) -> None:
    """The batch has four samples, and a CPU's host memory is its own; what is offered runs."""
    words, offered = [*TINY, "train.steps=1"], []
    for expected in ({"ckpt=every1", "accum=x4"}, {"precision=bf16", "optimizer=adamw_8bit"}):
        words += offered
        outcome = call(*words, "name=out_of_memory@1")
        assert outcome.row["status"] == "oom", outcome.said()
        offered = outcome.row["reason"].rpartition(": try ")[2].split(" or ")
        assert set(offered) == expected
    assert call(*words, "precision=bf16").code == 0


@pytest.mark.slow
def test_the_advice_helps(call: Call) -> None:
    """What the row proposes fits under the same cap."""
    outcome = call(
        *TINY,
        "train.batch_size=256",
        "data.sequence_length=64",
        "vram=24MiB",
        "train.steps=1",
        "accum=x8",
        "ckpt=every1",
    )
    assert outcome.code == 0, outcome.said()


def test_a_point_is_killed_beside_its_workers(call: Call, shared_server: Server) -> None:
    """They don't outlive it: the next point finds no strangers."""
    outcome = call(*TINY, "loader=workers", "train.steps=9", "name=kill")
    assert outcome.row["status"] == "killed"
    assert shared_server._process is not None
    assert children(shared_server._process.pid) == []


def test_a_worker_of_the_loader_is_killed(call: Call) -> None:
    outcome = call(*TINY, "loader=workers", "train.steps=9", "name=kill_worker")
    assert outcome.code == 1
    assert outcome.row["status"] == "error"
    assert "DataLoader worker" in outcome.row["reason"]
    # torch notices it in one of two ways
    assert any(words in outcome.row["reason"] for words in ("is killed by signal: Killed", "exited unexpectedly"))


@pytest.mark.parametrize("mode", ["train", "measure"])
def test_numbers_that_are_none_any_more(call: Call, mode: str) -> None:
    outcome = call(*TINY, "optimizer.lr=1e30", "train.steps=9", "measure.max_seconds=1", f"mode={mode}")
    assert outcome.code == 1
    assert outcome.row["status"] == "nonfinite"
    assert "optimizer.lr=1e+29" in outcome.row["reason"]
    assert "Traceback" not in outcome.out + outcome.err


@pytest.mark.slow
def test_time_is_up(start: Start, tmp_path: Path) -> None:
    """For a point that hangs, and for one that is stopped, as by Ctrl-Z. Both at once: they wait, they don't work."""
    for name in ("hang", "stop"):
        (tmp_path / name).mkdir()
    words = ("-m", *TINY, "seed=1", "timeout_s=3")
    for call in [start(*words, f"name={name}", cwd=tmp_path / name) for name in ("hang", "stop")]:
        outcome = call.end()
        assert outcome.code == 1, outcome.said()
        assert outcome.row["status"] == "timeout"
        assert outcome.row["reason"] == "still running after timeout_s=3"
        call.wait_until_gone(1)


@pytest.mark.slow
def test_the_import_of_torch_takes_none_of_the_time(train: Call, tmp_path: Path) -> None:
    """However slow the disk."""
    slowly = 'import sys, time\n"lowvram.launch.fork_server" in sys.orig_argv and time.sleep(5)\n'
    (tmp_path / "sitecustomize.py").write_text(slowly)
    outcome = train(*TINY, "train.steps=1", "timeout_s=5", env={"PYTHONPATH": str(tmp_path)})
    assert outcome.row["status"] == "ok", outcome.said()


def test_what_can_still_save_when_time_is_up_does(call: Call) -> None:
    outcome = call(*TINY, "train.steps=900", "timeout_s=1", "name=slow")
    assert outcome.row["reason"] == "still running after timeout_s=1"
    assert len(list(outcome.folder.glob("snapshots/step_*.pt"))) == 1
    assert outcome.command("continue with") == [f"resume={outcome.folder.relative_to(outcome.cwd)}"]


@pytest.mark.slow
def test_the_program_is_killed(start: Start, tmp_path: Path) -> None:
    """No process stays: not while the server imports, not in steps with workers (a snapshot is saved), not when the
    point hangs."""
    folders = [tmp_path / name for name in ("importing", "working", "hanging")]
    for folder in folders:
        folder.mkdir()
    words = (*TINY, "train.steps=900", "loader=workers", "logger=wandb")
    importing = start(*words, cwd=folders[0])
    working = start(*words, "name=slow", cwd=folders[1])
    hanging = start(*words, "name=hang@0", cwd=folders[2])
    importing.server()
    importing.process.kill()
    working.wait_for("started")
    wait_until(lambda: any(file.read_text() for file in folders[1].glob("outputs/*/*/metrics.jsonl")), "metrics")
    working.process.kill()
    hanging.child()
    hanging.process.kill()
    for call in (importing, working, hanging):
        call.wait_until_gone()
    assert "Traceback" not in importing.end().err
    outcome = working.end()
    assert "Traceback" not in outcome.err
    assert len(list(outcome.folder.glob("snapshots/step_*.pt"))) == 1
    assert history(outcome.folder)


@pytest.mark.slow  # quicker: the kills of tests/faults/test_sample.py
@pytest.mark.parametrize("seed", [1, 2])
def test_no_line_is_lost_or_doubled_when_the_program_is_killed(
    start: Start, call: Call, tmp_path: Path, seed: int
) -> None:
    """It stands still before it dies: its point makes steps and snapshots of which it never learns."""
    words = (*TINY, "train.steps=14", "train.eval_every=3", "snapshot.every_steps=2")
    wanted = history(call(*words).folder)
    folder = tmp_path / "killed"
    running = start(*words, "name=slow", f"hydra.run.dir={folder}")
    wait_until(lambda: (folder / "metrics.jsonl").exists(), "metrics")
    running.process.send_signal(signal.SIGSTOP)
    time.sleep(random.Random(seed).uniform(0, 1.5))
    running.process.kill()
    running.wait_until_gone(15)
    again = call(f"resume={folder}", "name=null")
    assert again.code == 0, again.said()
    assert history(folder) == wanted


SINGLE = {
    Status.OK: "train.steps=1",
    Status.INCOMPATIBLE: "precision=tf32",
    Status.NONFINITE: "optimizer.lr=1e30 train.steps=9",
    Status.OOM: "name=bad_alloc",
    Status.KILLED: "name=kill",
    Status.ERROR: "name=raise",
    Status.INTERRUPTED: "name=term",
    Status.SKIPPED: "vram=256KiB plan.skip=true",  # far less than its tensors: what else is counted depends on torch
    Status.TIMEOUT: "name=slow timeout_s=0.5 train.steps=99",
}
CODES = {Status.OK: 0, Status.INCOMPATIBLE: 3, Status.INTERRUPTED: 75}  # of single runs; 1 for all others


@pytest.mark.parametrize("status", Status)
def test_the_exit_code_of_a_single_run(call: Call, status: Status) -> None:
    outcome = call(*TINY, *SINGLE[status].split(), "device=cpu")
    assert outcome.code == CODES.get(status, 1), outcome.said()
    if status == Status.INCOMPATIBLE:
        assert list(outcome.cwd.iterdir()) == []
    else:
        assert outcome.row["status"] == status
        assert outcome.row["status"] in outcome.out


SWEEPS = {  # name or words, and the swept ones -> statuses, exit code
    "name=2.bad_alloc": (["ok", "oom"], 0),
    "precision=fp32,tf32 seed=1": (["ok", "incompatible"], 0),
    "precision=tf32": (["incompatible", "incompatible"], 3),
    "name=1.kill": (["killed", "ok"], 1),
    "name=1.term": (["interrupted", "ok"], 75),
}


@pytest.mark.parametrize("words", first_of(list(SWEEPS), 2))
def test_the_exit_code_of_a_sweep(call: Call, words: str) -> None:
    statuses, code = SWEEPS[words]
    outcome = call("-m", *TINY, "device=cpu", "seed=1,2", *words.split())
    assert outcome.code == code, outcome.said()
    assert list(outcome.statuses.values()) == statuses


@pytest.mark.parametrize("mode", first_of(["train", "measure"]))
def test_a_folder_that_is_removed_meanwhile_is_an_error(call: Call, tmp_path: Path, mode: str) -> None:
    """Nothing of the run is there: it must not look as if it were."""
    outcome = call(*TINY, f"mode={mode}", "name=remove_folder", f"hydra.run.dir={tmp_path / 'run'}")
    assert outcome.code == 1, outcome.said()
    early = "No such file or directory"  # the point's process is faster than its parent
    said = rf"error: (its file was removed by somebody|{early}) while writing {tmp_path / 'run'}"
    assert re.search(said, outcome.out), outcome.said()
    assert "Traceback" not in outcome.err


@pytest.mark.slow
def test_an_error_without_a_text_is_named(call: Call) -> None:
    row = call(*TINY, "name=silent_message").row
    assert row["status"] == "error"
    assert row["reason"] == "Broken: its message can't be had, as that raises RuntimeError"


def test_native_noise_is_cut(call: Call) -> None:
    outcome = call(*TINY, "name=native_noise")
    assert outcome.row["status"] == "ok"
    log = (outcome.folder / "native.log").read_text()
    assert len(log) < LARGEST_BYTES
    assert log.startswith("begin\n")
    assert "lowvram has cut" in log
    assert log.endswith("\nend\n")


def test_a_line_without_end_is_cut(call: Call) -> None:
    outcome = call(*TINY, "name=long_line")
    assert outcome.code == 0, outcome.said()[-2000:]
    (line,) = [line for line in outcome.out.splitlines() if line.startswith("xxx")]
    assert line.endswith(f"x… ({2**23 - LONGEST_LINE:,} characters more)")


@pytest.mark.slow
def test_a_message_without_end_is_cut(call: Call) -> None:
    row = call(*TINY, "name=long_message").row
    assert row["status"] == "error"
    assert row["reason"].startswith("ValueError: xxx")
    assert row["reason"].endswith("characters more)")
    assert len(row["reason"]) < LONGEST_REASON + 100


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("foreign_bytes", ["an event of the point's process is left out: Expecting value", "999 more lines of events"]),
        (
            "unknown_events",
            [
                "an event of the point's process is left out: unknown event 'x'",
                "2 more lines of events.jsonl are no events, and left out",
            ],
        ),
    ],
)
def test_what_others_write_among_the_events_is_reported_and_costs_nothing(
    call: Call, fault: str, words: list[str]
) -> None:
    outcome = call(*TINY, f"name={fault}")
    assert outcome.code == 0, outcome.said()
    assert [line["step"] for line in history(outcome.folder)] == [1, 2, 3, 3]
    warnings = [line for line in outcome.out.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == len(words)
    assert all(line.startswith(f"warning: {word}") for line, word in zip(warnings, words, strict=True))
