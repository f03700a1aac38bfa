"""TensorBoard's event files, read back with its own reader."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from lowvram.config.parent_settings import LoggerSettings
from lowvram.config.secret import REFUSED
from lowvram.results.loggers import event_file
from lowvram.results.loggers.all import Loggers
from lowvram.results.loggers.logger import LoggedRun, config_of
from lowvram.results.loggers.tensorboard import FOLDER, TensorBoard, folder_name
from lowvram.results.row import GIB, Row, empty_row, merge
from tests.calls import TINY, Outcome, history
from tests.offline import records_of

CONFIG = {
    "seed": 1,
    "name": None,
    "optimizer": {"lr": 0.1, "_target_": "x"},
    "data": {"path": None, "api_key": "hunter22"},
}
CHOICES = {"precision": "bf16"}


def ended(status: str, **fields: Any) -> Row:
    return merge(empty_row(), {"status": status, "choices": CHOICES, **fields})


def run_in(folder: Path, step: int = 0, name: str = "bf16-every2") -> LoggedRun:
    settings = LoggerSettings(tensorboard=True, tags=["thesis"], notes="one | two")
    config = config_of(CONFIG, ended("ok", provenance={"torch": "2.13.0"}))
    return LoggedRun(folder, name, "my sweep", "train", settings, config, step)


def read(folder: Path) -> EventAccumulator:
    (run,) = (folder / FOLDER).iterdir()
    return EventAccumulator(str(run), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def points(reader: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in reader.Scalars(tag)]


def text(reader: EventAccumulator, tag: str) -> str:
    return reader.Tensors(tag)[-1].tensor_proto.string_val[0].decode()


def trial(reader: EventAccumulator, tag: str) -> Any:
    """What the page of hyperparameters reads."""
    content = reader.SummaryMetadata(f"_hparams_/{tag}").plugin_data.content
    return getattr(plugin_data_pb2.HParamsPluginData.FromString(content), tag)  # pyright: ignore


def test_figures_settings_and_the_end_are_read_back(tmp_path: Path):
    logger = TensorBoard.start(run_in(tmp_path))
    for step, loss in ((1, 4.0), (2, 3.0)):
        logger.log(step, {"loss/train": loss})
    logger.log(2, {"loss/eval": 3.5})
    logger.log_curves("memory_in_step", {"activations_gib": [0.0, 2.0, 0.5]})
    logger.finish(ended("ok", memory={"peak_bytes": GIB}))
    reader = read(tmp_path)
    assert points(reader, "loss/train") == [(1, 4.0), (2, 3.0)]
    assert points(reader, "loss/eval") == [(2, 3.5)]
    assert points(reader, "memory_in_step/activations_gib") == [(0, 0.0), (1, 2.0), (2, 0.5)]
    assert points(reader, "final/memory/peak_gib") == [(2, 1.0)]
    started = trial(reader, "session_start_info")
    settings = {name: value.string_value or value.number_value for name, value in started.hparams.items()}
    assert settings == {
        "choice.precision": "bf16",
        "seed": 1,
        "optimizer.lr": 0.1,
        "data.path": "null",
        "data.api_key": REFUSED,
    }
    assert trial(reader, "session_end_info").status == 1  # STATUS_SUCCESS
    about = text(reader, "about")
    assert all(line in about for line in ("| notes | one \\| two |", "| tags | thesis |", "| torch | 2.13.0 |"))
    assert "| status | ok |" in text(reader, "ended")
    assert [folder.name for folder in (tmp_path / FOLDER).iterdir()] == ["bf16-every2"]


def test_a_failed_run_is_a_failed_trial(tmp_path: Path):
    TensorBoard.start(run_in(tmp_path)).finish(ended("oom", reason="too large"))
    assert trial(read(tmp_path), "session_end_info").status == 2  # STATUS_FAILURE
    assert "| reason | too large |" in text(read(tmp_path), "ended")


def test_a_resumed_run_has_every_step_once(tmp_path: Path):
    first = TensorBoard.start(run_in(tmp_path))
    for step in range(1, 6):
        first.log(step, {"loss/train": float(step)})
    first.finish(ended("killed"))
    # Its last snapshot was after step 3. The name has changed, the folder stays.
    second = TensorBoard.start(run_in(tmp_path, step=3, name="bf16-every2-steps8"))
    for step in range(4, 9):
        second.log(step, {"loss/train": 10.0 * step})
    second.finish(ended("ok"))
    assert points(read(tmp_path), "loss/train") == [
        (1, 1),
        (2, 2),
        (3, 3),
        *((step, 10.0 * step) for step in range(4, 9)),
    ]


def test_a_run_that_begins_again_in_another_process_has_every_step_once(tmp_path: Path):
    logger = TensorBoard.start(run_in(tmp_path))
    logger.log(1, {"loss/train": 1.0})
    logger.go_on(run_in(tmp_path, step=0))
    for step in (1, 2):
        logger.log(step, {"loss/train": 2.0})
    logger.finish(ended("ok"))
    assert points(read(tmp_path), "loss/train") == [(1, 2.0), (2, 2.0)]


def test_folders_have_names_that_any_run_can_have():
    assert folder_name("bf16-every2-lr0.01") == "bf16-every2-lr0.01"
    assert folder_name("../../evil") == "evil"
    assert folder_name("…") == "run"


def test_without_the_package_it_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    event_file.package.cache_clear()
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    loggers = Loggers()
    loggers.begin(run_in(tmp_path))
    loggers.log(1, {"loss/train": 1.0})
    loggers.finish(ended("ok"))
    (sentence,) = loggers.notes
    assert sentence.startswith("TensorBoard does not record this point: it needs pip install 'lowvram[tensorboard]'")
    assert list(tmp_path.iterdir()) == []


def test_nothing_imports_torch(tmp_path: Path):
    code = f"""
import sys
from pathlib import Path
from lowvram.config.parent_settings import LoggerSettings
from lowvram.results.loggers.logger import LoggedRun
from lowvram.results.loggers.tensorboard import TensorBoard
from lowvram.results.row import empty_row
logger = TensorBoard.start(LoggedRun(Path({str(tmp_path)!r}), "n", None, "train", LoggerSettings()))
logger.log(1, {{"loss/train": 1.0}})
logger.finish({{**empty_row(), "status": "ok"}})
print({{"torch", "tensorflow"}} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.slow  # the tests above are quicker, and test_all.py has both
def test_a_run_of_both_loggers_and_its_continuation(call: Callable[..., Outcome]):
    words = [word for word in TINY if not word.startswith("logger")]
    outcome = call(*words, "logger=[wandb,tensorboard]", "ckpt=every2", "train.steps=4", "train.eval_every=2")
    assert outcome.code == 0, outcome.said()
    assert outcome.row["logged"]["name"].startswith("synthetic-every2-num_layers1-")
    (part,) = outcome.folder.glob("wandb/offline-run-*")
    rows = [record["history"]["item"] for record in records_of(part) if record["type"] == "history"]
    assert [row["step"] for row in rows if "loss/eval" in row] == [2, 4]
    losses = [(row["step"], row["loss/train"]) for row in history(outcome.folder) if "loss/train" in row]
    reader = read(outcome.folder)
    assert points(reader, "loss/train") == [(step, pytest.approx(loss)) for step, loss in losses]
    assert [step for step, _ in points(reader, "loss/eval")] == [2, 4]
    assert points(reader, "memory_now/optimizer_gib")[-1][1] > 0
    assert max(value for _, value in points(reader, "memory_in_step/activations_gib")) == pytest.approx(
        outcome.row["memory"]["by_kind_max"]["activations"] / GIB
    )
    again = call(f"resume={outcome.folder}", "train.steps=6")
    assert again.code == 0, again.said()
    assert [step for step, _ in points(read(outcome.folder), "loss/train")] == [1, 2, 3, 4, 5, 6]
