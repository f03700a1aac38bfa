"""W&B: what a run holds is read back with W&B's own command."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lowvram.config.secret import REFUSED
from lowvram.results.row import GIB, Row, empty_row, merge
from lowvram.results.wandb.run import RECORDERS, NullRecorder, Recorder, Run, final_values, stored_run_id
from tests.offline import inspect

LOGGER = {"name": "wandb", "entity": None, "project": "lowvram-tests"}
CONFIG = {"seed": 1, "data": {"path": None, "hf_token": "hunter2"}}
CHOICES = {"ckpt": "every2", "precision": "bf16"}


def start(folder: Path, resume_id: str | None = None) -> Recorder:
    return Run.start(folder, LOGGER, "bf16-every2", "my-sweep", CONFIG, CHOICES, resume_id)


def ended(status: str, **fields: Any) -> Row:
    return merge(empty_row(), {"status": status, **fields})


def test_an_offline_run_read_back(without_account: Path, capfd: pytest.CaptureFixture[str]):
    recorder = start(without_account)
    for step, loss in ((1, 4.0), (2, 3.0)):
        recorder.log(step, {"loss/train": loss, "memory/peak_gib": 0.5})
    memory = {"peak_bytes": GIB, "source": "tensor_ledger", "by_kind_max": {"activations": GIB // 2}}
    recorder.finish(ended("ok", memory=memory, loss={"last": 2.5, "eval": float("nan")}))
    assert capfd.readouterr() == ("", "")

    seen = json.loads(inspect(recorder.sync_command, "--summary", "--json"))
    assert (seen["name"], seen["project"], seen["state"]) == ("bf16-every2", "lowvram-tests", "finished")
    data = {"path": None, "hf_token": REFUSED}
    assert seen["config"] == {"choice.ckpt": "every2", "choice.precision": "bf16", "seed": 1, "data": data}
    # The last step logged other values: ours must have the last word.
    assert seen["summary"]["loss/train"] == 2.5
    assert seen["summary"]["memory/peak_gib"] == 1.0
    assert seen["summary"]["memory/activations_gib"] == 0.5
    assert seen["summary"]["status"] == "ok"

    text = inspect(recorder.sync_command, "--json")
    records = [json.loads(line) for line in text.splitlines()]
    steps = [record["history"]["item"] for record in records if record["type"] == "history"]
    assert [(step["_step"], step["loss/train"]) for step in steps] == [(1, 4.0), (2, 3.0)]
    assert next(record["run"]["run_group"] for record in records if record["type"] == "run") == "my-sweep"
    assert "hunter2" not in text


@pytest.mark.parametrize("status", ["oom", "incompatible"])
def test_a_failed_point_is_a_failed_run(without_account: Path, status: str):
    recorder = start(without_account)
    recorder.finish(ended(status, reason="because"))
    seen = json.loads(inspect(recorder.sync_command, "--summary", "--json"))
    assert seen["state"] == "failed"
    assert (seen["summary"]["status"], seen["summary"]["reason"]) == (status, "because")


def test_a_run_goes_on_under_its_id(without_account: Path):
    assert stored_run_id(without_account) is None
    first = start(without_account)
    first.finish(ended("interrupted"))
    run_id = stored_run_id(without_account)
    assert run_id is not None
    assert run_id.startswith("a-point-")
    second = start(without_account, resume_id=run_id)
    second.finish(ended("ok"))
    assert stored_run_id(without_account) == run_id
    assert json.loads(inspect(second.sync_command, "--summary", "--json"))["run_id"] == run_id
    assert json.loads(inspect(first.sync_command, "--summary", "--json"))["run_id"] == run_id


def test_ids_differ_between_runs_of_a_folder(without_account: Path):
    ids = set()
    for _ in range(2):
        start(without_account).finish(ended("ok"))
        ids.add(stored_run_id(without_account))
    assert len(ids) == 2


def test_the_sync_command_works_as_typed(without_account: Path):
    recorder = start(without_account)
    recorder.finish(ended("ok"))
    assert recorder.sync_command is not None
    dry_run = f"PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH {recorder.sync_command} --dry-run"
    done = subprocess.run(dry_run, shell=True, capture_output=True, text=True, check=True)
    assert str(stored_run_id(without_account)) in done.stdout + done.stderr


def test_disabled_means_nothing_at_all(without_account: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    recorder = start(without_account)
    recorder.log(1, {"loss/train": 1.0})
    recorder.finish(ended("ok"))
    assert isinstance(recorder, NullRecorder)
    assert list(without_account.iterdir()) == []


def test_an_unreachable_server_costs_the_first_point_a_wait_and_nothing_else(
    without_account: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("lowvram.results.wandb.run._INIT_TIMEOUT_S", 1.0)
    first = start(without_account)
    assert first.notice is not None
    assert first.notice.startswith("W&B records offline: ")
    first.log(1, {"loss/train": 1.0})
    first.finish(ended("ok"))
    assert json.loads(inspect(first.sync_command, "--summary", "--json"))["summary"]["status"] == "ok"
    monkeypatch.setattr("lowvram.results.wandb.run._INIT_TIMEOUT_S", 1e-9)
    second = start(without_account)
    second.finish(ended("ok"))
    assert second.notice is None
    assert second.sync_command is not None


def test_a_key_that_cannot_be_one(without_account: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_API_KEY", "no")
    recorder = start(without_account)
    recorder.finish(ended("ok"))
    assert "WANDB_API_KEY" in (recorder.notice or "")
    assert recorder.sync_command is not None


DEATH = """
import json, os, signal, sys
from pathlib import Path
from lowvram.results.row import empty_row, merge
from lowvram.results.wandb.run import Run

def point():
    return Run.start(Path(sys.argv[1]), {"entity": None, "project": "lowvram-tests"}, "n", None, {}, {})

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
print(json.dumps([first.notice, second.notice, second.sync_command]))
"""


def test_the_death_of_its_service_ends_the_recording_not_the_point(without_account: Path):
    """In a process of its own, because W&B never waits for the service that it lost."""
    command = [sys.executable, "-c", DEATH, str(without_account)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    first_notice, second_notice, sync_command = json.loads(done.stdout)
    assert first_notice.startswith("W&B stopped recording: ")
    assert second_notice.startswith("W&B records offline: ")
    assert json.loads(inspect(sync_command, "--summary", "--json"))["state"] == "finished"


def test_a_project_that_wandb_refuses_is_reported(without_account: Path):
    recorder = Run.start(without_account, LOGGER | {"project": "a/b"}, "n", None, {}, {})
    recorder.finish(ended("ok"))
    assert (recorder.notice or "").startswith("W&B does not record this point: Invalid project name")


def test_no_logger_has_the_same_interface(tmp_path: Path):
    recorder = RECORDERS["none"].start(tmp_path, LOGGER, "n", None, CONFIG, CHOICES)
    recorder.log(1, {"loss/train": 1.0})
    recorder.finish(ended("ok"))
    assert (recorder.notice, recorder.address, recorder.sync_command) == (None, None, None)
    assert list(tmp_path.iterdir()) == []
    assert RECORDERS["wandb"] is Run


def test_final_values_use_the_names_of_the_metrics():
    row = ended(
        "ok",
        memory={
            "peak_bytes": GIB,
            "reserved_bytes": 2 * GIB,
            "fragmentation_bytes": GIB,
            "inactive_split_bytes": GIB // 2,
            "alloc_retries": 0,
            "by_kind_max": {"parameters": 0, "host": GIB},
        },
        traffic={"to_host_bytes": GIB, "to_device_bytes": 2 * GIB, "waited_ms": 3.0},
        plan={"allocated_bytes": 3 * GIB},
        throughput={"samples_per_s": 5.0, "tokens_per_s": 6.0},
        time={"step_ms_p50": 7.0},
        loss={"first": 9.0, "last": 1.0, "eval": 2.0},
        eval={"accuracy": 0.5, "perplexity": 8.0},
        fidelity={"gradient_error": 0.004, "gradient_cosine": 0.9, "loss_gap": 0.0, "losses": [1.0], "reason": None},
    )
    assert final_values(row) == {
        "status": "ok",
        "memory/peak_gib": 1.0,
        "memory/reserved_gib": 2.0,
        "memory/fragmentation_gib": 1.0,
        "memory/inactive_split_gib": 0.5,
        "memory/alloc_retries": 0,
        "traffic/to_host_gib": 1.0,
        "traffic/to_device_gib": 2.0,
        "traffic/waited_ms": 3.0,
        "memory/planned_gib": 3.0,
        "memory/parameters_gib": 0,
        "memory/host_gib": 1.0,
        "throughput/samples_per_s": 5.0,
        "throughput/tokens_per_s": 6.0,
        "time/step_ms": 7.0,
        "loss/train": 1.0,
        "loss/eval": 2.0,
        "eval/accuracy": 0.5,
        "eval/perplexity": 8.0,
        "fidelity/gradient_error": 0.004,
        "fidelity/gradient_cosine": 0.9,
        "fidelity/loss_gap": 0.0,
    }
    assert final_values(ended("killed")) == {"status": "killed"}
