"""The record beside a point that was handed to a queue, and the ids of its points."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from lowvram.config import identity
from lowvram.config.defaults import CONF
from lowvram.launch.launcher import TOKEN, note_token
from lowvram.results.files.sealed import sealed
from lowvram.runs.submission import Submission, device_in

MADE = Submission(
    "slurm", "0a", "seed1-0a", "1" * 16, "seed1", 3, {"name": "seed1", "group": None}, "a card", "my_sweep"
)


def test_a_record_is_read_back_and_names_its_job_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p").mkdir()
    assert Submission.read(tmp_path / "p") is None
    MADE.write(tmp_path / "p")
    assert Submission.read(tmp_path / "p") == MADE
    replace(MADE, job="12").write(tmp_path / "p")
    assert Submission.read(tmp_path / "p") == replace(MADE, job="12")
    assert device_in(tmp_path) == "a card"
    for token, is_its_job in (("0a", True), ("0b", False), ("", False)):
        monkeypatch.setenv(TOKEN, token)
        note_token()
        assert TOKEN not in os.environ  # what a job starts is no job
        assert (Submission.of_this_job(tmp_path / "p") is not None) == is_its_job
    note_token()


def test_a_record_that_was_damaged_is_none(tmp_path: Path) -> None:
    MADE.write(tmp_path)
    path = tmp_path / "queue_job.json"
    text = path.read_text()
    for damaged in (text.replace("seed1", "seed2"), text[:-30], "[]", "", '{"token": "0a"}', "\xff"):
        path.write_text(damaged)
        assert Submission.read(tmp_path) is None
        assert device_in(tmp_path.parent) is None


def test_ids_name_the_device_of_the_machine_that_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    identity.register_resolvers()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        here, there = (compose("config", ["seed=1", *more]) for more in ([], ["launcher=slurm", "launcher.cpus=2"]))
    before = identity.point_id(_root_=here)
    assert identity.point_id(_root_=there) == before  # the launcher is no part of it
    name = identity.device_name()
    monkeypatch.setattr(identity, "device_name", lambda: "a card that only the node has")
    try:
        assert identity.point_id(_root_=here) != before
        identity.name_device(name)
        assert identity.point_id(_root_=here) == before
    finally:
        identity.name_device(None)


def test_a_record_of_the_first_version_is_read(tmp_path: Path) -> None:
    """Which knew no queue but Slurm, and called its files after it."""
    slurm = replace(MADE, queue="slurm")
    fields = {name: value for name, value in asdict(slurm).items() if name != "queue"}
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "slurm_job.json").write_text(sealed(json.dumps(fields, indent=1), "\n "))
    assert Submission.read(tmp_path / "p") == slurm
    assert device_in(tmp_path) == MADE.device
