"""W&B: what a run holds is read back with W&B's own command."""

import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lowvram.config.parent_settings import MODEL, LoggerSettings
from lowvram.config.secret import REFUSED
from lowvram.results.files.manifest import Manifest, content_of, write
from lowvram.results.loggers.all import Loggers
from lowvram.results.loggers.logger import LoggedRun, config_of
from lowvram.results.loggers.wandb import RUN_ID_FILE, WandbRun, stored_run_id
from lowvram.results.row import GIB, Row, empty_row, merge
from tests.offline import inspect, records_of
from tests.tiers import first_of

pytestmark = pytest.mark.medium

SETTINGS = LoggerSettings(wandb=True, project="lowvram-tests", tags=["thesis", "first"], notes="a note")
CONFIG = {"seed": 1, "data": {"path": None, "hf_token": "hunter2"}}
CHOICES = {"ckpt": "every2", "precision": "bf16"}


def ended(status: str, **fields: Any) -> Row:
    return merge(empty_row(), {"status": status, "choices": CHOICES, "config": CONFIG, **fields})


def run_in(folder: Path, **about: Any) -> LoggedRun:
    provenance = {"torch": "2.13.0", "git_sha": "abc", "device_name": "card", "device_memory_bytes": 8 * GIB}
    config = config_of(CONFIG, ended("ok", provenance=provenance))
    return LoggedRun(folder, "bf16-every2", "my-sweep", "train", SETTINGS, config, **about)


def start(folder: Path, **about: Any) -> WandbRun:
    logger = WandbRun.start(run_in(folder, **about))
    assert logger is not None
    return logger


def records(logger: WandbRun) -> list[dict[str, Any]]:
    return [json.loads(line) for line in inspect(logger.upload, "--json").splitlines()]


def history(logger: WandbRun) -> list[dict[str, Any]]:
    """The logged rows, without what W&B adds."""
    rows = [record["history"]["item"] for record in records(logger) if record["type"] == "history"]
    return [{name: value for name, value in row.items() if name[0] != "_"} for row in rows]


def history_of_parts(folder: Path) -> list[dict[str, Any]]:
    """The logged rows of all parts of the run in a folder, in their order."""
    parts = sorted(folder.glob("wandb/offline-run-*"), key=lambda part: part.stat().st_mtime_ns)
    found = [record["history"]["item"] for part in parts for record in records_of(part) if record["type"] == "history"]
    return sorted(found, key=lambda row: row["_timestamp"])


def test_an_offline_run_read_back(without_account: Path, capfd: pytest.CaptureFixture[str]):
    recorder = start(without_account)
    for step, loss in ((1, 4.0), (2, 3.0)):
        recorder.log(step, {"loss/train": loss, "memory/peak_gib": 0.5})
    memory = {"peak_bytes": GIB, "source": "tensor_ledger", "by_kind_max": {"activations": GIB // 2}}
    recorder.finish(ended("ok", memory=memory, loss={"last": 2.5, "eval": float("nan")}))
    assert capfd.readouterr() == ("", "")

    seen = json.loads(inspect(recorder.upload, "--summary", "--json"))
    assert (seen["name"], seen["project"], seen["state"]) == ("bf16-every2", "lowvram-tests", "finished")
    data = {"path": None, "hf_token": REFUSED}
    provenance = seen["config"].pop("provenance")
    assert seen["config"] == {"choice": CHOICES, "seed": 1, "data": data}
    assert provenance == {
        "torch": "2.13.0",
        "git_sha": "abc",
        "device_name": "card",
        "device_memory_gib": 8.0,
    }
    # The last step logged other values: ours must have the last word.
    assert seen["summary"]["loss/train"] == 2.5
    assert seen["summary"]["memory/peak_gib"] == 1.0
    assert seen["summary"]["memory/activations_gib"] == 0.5
    assert seen["summary"]["status"] == "ok"

    assert [(row["step"], row["loss/train"]) for row in history(recorder)] == [(1, 4.0), (2, 3.0)]
    about = next(record["run"] for record in records(recorder) if record["type"] == "run")
    assert (about["run_group"], about["job_type"], about["notes"]) == ("my-sweep", "train", "a note")
    assert about["tags"] == ["first", "thesis"] or about["tags"] == ["thesis", "first"]
    assert "hunter2" not in inspect(recorder.upload, "--json")


def test_variables_of_the_environment_hold_where_nothing_is_typed(
    without_account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"PROJECT": "theirs", "ENTITY": "team", "TAGS": "a, b", "NOTES": "of theirs"}
    for name, value in told.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    logger = WandbRun.start(replace(run_in(without_account), settings=LoggerSettings(wandb=True)))
    assert logger is not None
    logger.finish(ended("ok"))
    about = next(record["run"] for record in records(logger) if record["type"] == "run")
    assert (about["project"], about["entity"], about["notes"]) == ("theirs", "team", "of theirs")
    assert sorted(about["tags"]) == ["a", "b"]
    typed = WandbRun.start(run_in(without_account.parent / "home"))
    assert typed is not None
    typed.finish(ended("ok"))
    about = next(record["run"] for record in records(typed) if record["type"] == "run")
    assert (about["project"], about["notes"], sorted(about["tags"])) == ("lowvram-tests", "a note", ["first", "thesis"])
    monkeypatch.setenv("WANDB_DISABLED", "true")
    assert WandbRun.start(run_in(without_account)) is None


def test_an_evaluation_is_a_second_row_of_its_step(without_account: Path):
    recorder = start(without_account)
    rows = [(1, {"loss/train": 4.0}), (2, {"loss/train": 3.0}), (2, {"loss/eval": 3.5}), (3, {"loss/train": 2.0})]
    for step, values in rows:
        recorder.log(step, values)
    recorder.finish(ended("ok"))
    assert history(recorder) == [{"step": step, **values} for step, values in rows]
    axes = {
        record["metric"]["name"]: record["metric"].get("step_metric")
        for record in records(recorder)
        if record["type"] == "metric"
    }
    assert axes == {"step": None, "loss/train": "step", "loss/eval": "step"}


def test_curves_have_an_axis_of_their_own(without_account: Path):
    recorder = start(without_account)
    recorder.log(1, {"loss/train": 4.0})
    recorder.log_curves("memory_in_step", {"parameters_gib": [1.0, 1.0], "activations_gib": [0.0, 2.0]})
    recorder.log(2, {"loss/train": 3.0})
    recorder.finish(ended("ok"))
    first, *curve, last = history(recorder)
    assert (first, last) == ({"step": 1, "loss/train": 4.0}, {"step": 2, "loss/train": 3.0})
    names = ("memory_in_step/moment", "memory_in_step/parameters_gib", "memory_in_step/activations_gib")
    assert [tuple(row[name] for name in names) for row in curve] == [(0, 1.0, 0.0), (1, 1.0, 2.0)]


@pytest.mark.slow
def test_the_system_metrics_are_those_of_the_process_that_computes(
    without_account: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WANDB_X_STATS_SAMPLING_INTERVAL", "0.1")
    used = 200 * 2**20
    waits = f"held = bytearray({used}); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", waits], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        recorder = start(without_account, pid=child.pid)
        time.sleep(1.0)  # some samples
        recorder.finish(ended("ok"))
        child.communicate(b"\n")
    sampled = next(record["stats"]["item"] for record in records(recorder) if record["type"] == "stats")
    assert used / 2**20 < sampled["proc.memory.rssMB"] < used / 2**20 + 50  # this process holds more
    assert "cpu" in sampled or "memory_percent" in sampled  # the machine's


def test_a_run_that_goes_on_in_another_process_is_one_run_without_a_step_twice(without_account: Path):
    recorder = start(without_account, pid=None)
    for step in (1, 2):
        recorder.log(step, {"loss/train": 1.0})
    recorder.go_on(run_in(without_account, step=0, pid=os.getpid()))
    for step in (1, 2, 3):
        recorder.log(step, {"loss/train": 2.0})
    recorder.finish(ended("ok"))
    rows = history_of_parts(without_account)
    assert [(row["step"], row["loss/train"]) for row in rows] == [(1, 1.0), (2, 1.0), (3, 2.0)]


@pytest.mark.slow
def test_the_model_is_an_artifact_if_the_run_ended_well(without_account: Path):
    model = without_account / MODEL
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "mine.txt").write_text("the user's own file")
    write(model, Manifest({"model.safetensors": content_of(model / "model.safetensors")}))
    settings = replace(SETTINGS, artifact=MODEL)
    artifacts: dict[str, list[Any]] = {}
    for status in ("interrupted", "ok"):
        recorder = WandbRun.start(replace(run_in(without_account), settings=settings))
        assert recorder is not None
        recorder.finish(ended(status))
        artifacts[status] = [record["artifact"] for record in records(recorder) if record["type"] == "artifact"]
    assert artifacts["interrupted"] == []
    (artifact,) = artifacts["ok"]
    assert artifact["type"] == "model"
    paths = {content["path"]: content["local_path"] for content in artifact["manifest"]["contents"]}
    assert paths == {name: str(model / name) for name in ("model.safetensors", "files.json")}


def test_a_model_that_is_gone_leaves_a_finished_run(without_account: Path):
    model = without_account / MODEL
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    write(model, Manifest({"model.safetensors": content_of(model / "model.safetensors")}))
    (model / "model.safetensors").unlink()
    loggers = Loggers()
    loggers.begin(replace(run_in(without_account), settings=replace(SETTINGS, artifact=MODEL)))
    loggers.finish(ended("ok"))
    (sentence,) = loggers.notes
    assert sentence.startswith("W&B stopped recording: ")
    assert "model.safetensors" in sentence
    (upload,) = loggers.uploads
    assert json.loads(inspect(upload, "--summary", "--json"))["state"] == "finished"


@pytest.mark.parametrize("status", first_of(["oom", "incompatible"]))
def test_a_failed_point_is_a_failed_run(without_account: Path, status: str):
    recorder = start(without_account)
    recorder.finish(ended(status, reason="because"))
    seen = json.loads(inspect(recorder.upload, "--summary", "--json"))
    assert seen["state"] == "failed"
    assert (seen["summary"]["status"], seen["summary"]["reason"]) == (status, "because")


def test_a_run_goes_on_under_its_id(without_account: Path):
    assert stored_run_id(without_account) is None
    first = start(without_account)
    first.finish(ended("interrupted"))
    run_id = stored_run_id(without_account)
    assert run_id is not None
    assert run_id.startswith("a-point-")
    second = start(without_account)
    second.finish(ended("ok"))
    assert stored_run_id(without_account) == run_id
    assert json.loads(inspect(second.upload, "--summary", "--json"))["run_id"] == run_id
    assert json.loads(inspect(first.upload, "--summary", "--json"))["run_id"] == run_id


def test_a_run_of_an_agent_has_the_id_that_the_agent_gave_it(without_account: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_SWEEP_ID", "abc123")
    monkeypatch.setenv("WANDB_RUN_ID", "picked1")
    recorder = start(without_account)
    recorder.finish(ended("ok"))
    about = next(record["run"] for record in records(recorder) if record["type"] == "run")
    assert (about["run_id"], about["sweep_id"]) == ("picked1", "abc123")
    assert stored_run_id(without_account) == "picked1"


def test_ids_of_folders_of_one_name_differ(without_account: Path):
    ids = set()
    for parent in ("a", "b"):
        folder = without_account / parent / "point"
        folder.mkdir(parents=True)
        start(folder).finish(ended("ok"))
        ids.add(stored_run_id(folder))
    assert len(ids) == 2


@pytest.mark.parametrize("text", first_of(["another-run\ncrc32 00000000\n", "a/b", ""]))
def test_a_changed_id_is_told_and_not_used(without_account: Path, text: str):
    """The figures would go to another run."""
    start(without_account).finish(ended("interrupted"))
    (without_account / RUN_ID_FILE).write_text(text)
    second = start(without_account)
    second.finish(ended("ok"))
    new = stored_run_id(without_account)
    assert new is not None
    assert new != "another-run"
    assert f"was changed or damaged: this run goes on as {new}, a new run of W&B" in " ".join(second.notes)


def test_an_id_of_an_early_version_is_used(tmp_path: Path):
    (tmp_path / RUN_ID_FILE).write_text("point-0a1b2c")
    assert stored_run_id(tmp_path) == "point-0a1b2c"


@pytest.mark.slow
def test_the_sync_command_works_as_typed(without_account: Path):
    recorder = start(without_account)
    recorder.finish(ended("ok"))
    assert recorder.upload is not None
    dry_run = f"PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH {recorder.upload} --dry-run"
    done = subprocess.run(dry_run, shell=True, capture_output=True, text=True, check=True)
    assert str(stored_run_id(without_account)) in done.stdout + done.stderr


def test_disabled_means_nothing_at_all(without_account: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert WandbRun.start(run_in(without_account)) is None
    assert list(without_account.iterdir()) == []


@pytest.mark.slow  # the next test is quicker
def test_an_unreachable_server_costs_the_first_point_a_wait_and_nothing_else(
    without_account: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("lowvram.results.loggers.wandb._INIT_TIMEOUT_S", 1.0)
    first = start(without_account)
    (note,) = first.notes
    assert note.startswith("W&B records offline: ")
    first.log(1, {"loss/train": 1.0})
    first.finish(ended("ok"))
    assert json.loads(inspect(first.upload, "--summary", "--json"))["summary"]["status"] == "ok"
    monkeypatch.setattr("lowvram.results.loggers.wandb._INIT_TIMEOUT_S", 1e-9)
    second = start(without_account)
    second.finish(ended("ok"))
    assert second.notes == []
    assert second.upload is not None


def test_a_key_that_cannot_be_one(without_account: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_API_KEY", "no")
    recorder = start(without_account)
    recorder.finish(ended("ok"))
    assert "WANDB_API_KEY" in recorder.notes[0]
    assert recorder.upload is not None


DEATH = """
import json, os, signal, sys
from pathlib import Path
from lowvram.config.parent_settings import LoggerSettings
from lowvram.results.loggers.all import Loggers
from lowvram.results.loggers.logger import LoggedRun
from lowvram.results.row import empty_row, merge

def point():
    loggers = Loggers()
    settings = LoggerSettings(wandb=True, project="lowvram-tests")
    loggers.begin(LoggedRun(Path(sys.argv[1]), "n", None, "train", settings))
    return loggers

first = point()
children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
(service,) = [pid for pid in children if b"wandb-core" in Path(f"/proc/{pid}/cmdline").read_bytes()]
os.kill(int(service), signal.SIGKILL)
os.waitpid(int(service), 0)
for step in (1, 2):
    first.log(step, {"loss/train": 1.0})
first.finish(merge(empty_row(), {"status": "ok"}))
second = point()
second.log(1, {"loss/train": 1.0})
second.finish(merge(empty_row(), {"status": "ok"}))
print(json.dumps([first.notes[0], second.notes[0], second.uploads[0]]))
"""


@pytest.mark.slow
def test_the_death_of_its_service_ends_the_recording_not_the_point(without_account: Path):
    """In a process of its own, because W&B never waits for the service that it lost."""
    command = [sys.executable, "-c", DEATH, str(without_account)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    first_notice, second_notice, sync_command = json.loads(done.stdout)
    assert first_notice.startswith("W&B stopped recording: ")
    assert second_notice.startswith("W&B records offline: ")
    assert json.loads(inspect(sync_command, "--summary", "--json"))["state"] == "finished"
