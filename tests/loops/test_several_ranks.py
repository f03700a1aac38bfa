"""The modes on two ranks: the row, the snapshot and the weights are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lowvram.core.knob import Knob
from lowvram.core.mesh import data_ranks
from lowvram.loops.export.folder import load
from lowvram.loops.measure import Measure
from lowvram.loops.session import Interrupted
from lowvram.loops.train import Train
from tests.laboratory import relative_error
from tests.loops.sessions import Told, session_in
from tests.ranks import on_ranks
from tests.tiers import first_of

pytestmark = pytest.mark.medium

Values = list[tuple[int, float]]
Choices = dict[str, str | Knob]
OPTIONS = ["ddp", "fsdp"]
ALL: Choices = {"accum": "x2", "ckpt": "every2"}


def train_on_ranks(folder: Path, problem: str, choices: Choices, told: Told, is_resumed: bool = False) -> Any:
    """The losses that were told and the row; None for a run that was stopped. Only rank 0 is asked to stop."""
    told.stop_at = told.stop_at if data_ranks().is_first else None
    session = session_in(folder, problem, choices=choices, told=told, is_resumed=is_resumed, eval_every=2)
    try:
        row = Train().run(session)
    except Interrupted:
        row = None
    return told.values("loss/train"), told.values("loss/eval"), row


def measure_on_ranks(folder: Path, problem: str, choices: Choices) -> Any:
    return Measure().run(session_in(folder, problem, choices=choices, batch_size=8))


@pytest.mark.parametrize("problem", first_of(["resnet_group", "transformer"]))
@pytest.mark.parametrize("option", first_of(OPTIONS))
def test_the_row_of_a_measurement_is_that_of_one_process(tmp_path: Path, option: str, problem: str) -> None:
    wanted = measure_on_ranks(tmp_path, problem, ALL)
    rows = on_ranks(measure_on_ranks, tmp_path, problem, {**ALL, "sharding": option})
    for row in rows:
        assert row["loss"] == pytest.approx(wanted["loss"], rel=1e-4)
        assert row["eval"] == pytest.approx(wanted["eval"], rel=1e-4)
        assert row["model"] == wanted["model"]
    if problem == "transformer":  # both ranks' targets count, and the timed steps have the same
        for row in rows:
            per_step = row["throughput"]["tokens_per_s"] / row["throughput"]["samples_per_s"]
            wanted_per_step = wanted["throughput"]["tokens_per_s"] / wanted["throughput"]["samples_per_s"]
            assert per_step == pytest.approx(wanted_per_step)


@pytest.mark.parametrize("option", first_of(OPTIONS))
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path, option: str) -> None:
    """Two ranks train as one process, stop together, and are continued by one or by two."""
    choices: Choices = {**ALL, "sharding": option}
    wanted_losses, wanted_evals, wanted_row = train_on_ranks(tmp_path / "one", "transformer", ALL, Told())
    wanted = load(tmp_path / "one" / "model").state_dict()
    folder = tmp_path / "two"
    for losses, _, row in on_ranks(train_on_ranks, folder, "transformer", choices, Told(stop_at=3)):
        assert row is None
        assert losses == near(wanted_losses[:3])
    snapshot = {path.name: path.read_bytes() for path in (folder / "snapshots").iterdir()}
    assert len(snapshot) == 1
    for losses, evals, row in on_ranks(train_on_ranks, folder, "transformer", choices, Told(), True):
        assert losses == near(wanted_losses[3:])
        assert evals == near(wanted_evals[1:])
        assert row["loss"] == pytest.approx(wanted_row["loss"], rel=1e-4)
    assert relative_error(load(folder / "model").state_dict(), wanted) < 1e-3
    alone = tmp_path / "alone" / "snapshots"
    alone.mkdir(parents=True)
    for name, data in snapshot.items():
        (alone / name).write_bytes(data)
    losses, _, _ = train_on_ranks(alone.parent, "transformer", ALL, Told(), True)
    assert losses == near(wanted_losses[3:])


@pytest.mark.parametrize("option", first_of(OPTIONS[::-1]))
def test_ranks_go_on_with_what_one_process_has_saved(tmp_path: Path, option: str) -> None:
    wanted, _, _ = train_on_ranks(tmp_path / "whole", "transformer", ALL, Told())
    train_on_ranks(tmp_path, "transformer", ALL, Told(stop_at=3))
    for losses, _, _ in on_ranks(train_on_ranks, tmp_path, "transformer", {**ALL, "sharding": option}, Told(), True):
        assert losses == near(wanted[3:])


def near(values: Values) -> Any:
    return [(step, pytest.approx(value, rel=1e-4)) for step, value in values]


@pytest.mark.slow
@pytest.mark.parametrize("stepping", ["in_backward", "cpu_offload"])
def test_state_that_waits_on_the_hosts_of_ranks_is_saved_whole(tmp_path: Path, stepping: str) -> None:
    """Two ranks start, one process goes on and is stopped, two ranks go on."""
    choices: Choices = {**ALL, "stepping": stepping}
    wanted, _, _ = train_on_ranks(tmp_path / "one", "transformer", ALL, Told())
    sharded: Choices = {**choices, "sharding": "fsdp"}
    for losses, _, _ in on_ranks(train_on_ranks, tmp_path / "two", "transformer", sharded, Told(stop_at=2)):
        assert losses == near(wanted[:2])
    losses, _, _ = train_on_ranks(tmp_path / "two", "transformer", choices, Told(stop_at=4), True)
    assert losses == near(wanted[2:4])
    for losses, _, _ in on_ranks(train_on_ranks, tmp_path / "two", "transformer", sharded, Told(), True):
        assert losses == near(wanted[4:])
