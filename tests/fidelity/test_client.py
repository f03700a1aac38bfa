"""measure.fidelity=true, as a user sees it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lowvram.config.errors import Refused
from lowvram.fidelity.client import Comparison, Reference, check_fresh
from lowvram.launch.spec import Point
from lowvram.launch.torchrun import Launch
from lowvram.results.files.sealed import sealed
from lowvram.results.row import Row
from tests.calls import TINY, TINY_RESNET, Outcome, Running

Call = Callable[..., Outcome]
MEASURE = ("mode=measure", "measure.warmup_steps=1", "measure.steps=1", "device=cpu", "name=null")
WANTED = ("measure.fidelity=true", "measure.fidelity_steps=4")


def error(row: Row) -> float:
    assert row["fidelity"]["reason"] is None
    assert row["fidelity"]["gradient_cosine"] == pytest.approx(1 - row["fidelity"]["gradient_error"] ** 2 / 2, abs=0.01)
    return row["fidelity"]["gradient_error"]


@pytest.mark.slow
def test_exact_knobs_and_rounding_ones(call: Call) -> None:
    """One sweep, whose points share their references."""
    steppings = "stepping=in_backward,cpu_offload"
    outcome = call("-m", *TINY, *MEASURE, *WANTED, "precision=fp32,bf16", steppings, "accum=x2")
    assert outcome.code == 0, outcome.said()
    for name, row in outcome.rows.items():
        assert row["fidelity"]["loss_gap"] == 0
        assert (1e-3 if name.startswith("bf16") else 0) < error(row) < (2e-2 if name.startswith("bf16") else 2e-6)
        assert row["fidelity"]["reference"] == {"optimizer": "adamw", "adapter": "none", "parts": 1}
        assert len(row["fidelity"]["losses"]) == len(row["fidelity"]["band"]) == row["fidelity"]["steps"] == 4
        assert all(low < mean < high for low, mean, high in row["fidelity"]["band"])
    (references,) = outcome.cwd.glob("**/references")
    seeds = [json.loads(file.read_text())["losses"] for file in references.iterdir()]
    assert len(seeds) == 3
    assert len({tuple(losses) for losses in seeds}) == 3
    assert not list(outcome.cwd.glob("**/*.safetensors"))
    header, *_ = (outcome.folder.parent / "table.csv").read_text().splitlines()
    assert {"gradient_error", "gradient_cosine", "loss_gap"} <= set(header.split(","))


def test_it_touches_nothing_else(call: Call) -> None:
    outcome = call("-m", *TINY, *MEASURE, "measure.fidelity=false,true", "measure.fidelity_steps=2")
    plain, compared = sorted(outcome.rows.values(), key=lambda row: row["index"])
    assert plain["fidelity"] is None
    assert compared["fidelity"]["gradient_error"] == 0
    assert compared["fidelity"]["gradient_cosine"] == pytest.approx(1)
    assert compared["memory"]["peak_bytes"] == plain["memory"]["peak_bytes"]
    assert compared["memory"]["by_kind_max"] == plain["memory"]["by_kind_max"]
    assert compared["time"]["steps"] == plain["time"]["steps"]
    assert compared["loss"] == plain["loss"]
    left = {".hydra", ".lowvram", "memory_over_step.csv", "metrics.jsonl", "native.log", "result.json"}
    left |= {"events.jsonl", "spec.json"}
    assert {file.name for file in outcome.folder.iterdir()} == left


def test_a_wrong_denominator_is_seen(call: Call) -> None:
    """Planted: gradients twice as large, which AdamW's losses alone would hide. Neither does clipping hide it."""
    words = ("accum=x2", "stepping.clip=0.001", "name=Forgetful")
    outcome = call(*TINY, *MEASURE, *WANTED, *words)
    assert outcome.code == 0, outcome.said()
    assert outcome.row["fidelity"]["gradient_error"] == pytest.approx(1, abs=1e-5)
    assert outcome.row["fidelity"]["gradient_cosine"] == pytest.approx(1)
    assert "\nfidelity: gradient error 1.0e+00, cosine 1.000000, loss gap " in outcome.out


def test_losses_that_leave_the_band(call: Call) -> None:
    """Planted: they are told twice as large."""
    outcome = call(*TINY, *MEASURE, *WANTED, "accum=x2", "name=Forgetful")
    assert 0.5 < outcome.row["fidelity"]["loss_gap"] < 1


@pytest.mark.slow
def test_batch_norm_over_parts_is_seen(call: Call) -> None:
    outcome = call("-m", *TINY_RESNET, *MEASURE, *WANTED, "accum=none,x2", "model.norm=batch,group")
    errors = {name: row["fidelity"]["gradient_error"] for name, row in outcome.rows.items()}
    assert errors.pop("x2-normbatch") > 0.1
    assert max(errors.values()) < 2e-6


@pytest.mark.slow
def test_several_ranks_and_training(call: Call) -> None:
    """The gradients of all ranks together; and after training the weights are not those that are compared."""
    outcome = call(*TINY, *WANTED, "device=cpu", "sharding=fsdp", "sharding.ranks=2", "precision=bf16_pure")
    assert outcome.code == 0, outcome.said()
    assert 1e-3 < error(outcome.row) < 2e-2


@pytest.mark.slow
def test_a_reference_that_needs_parts(call: Call) -> None:
    """It grows until it fits under the cap of its point."""
    large = (*TINY, "train.batch_size=64", "data.sequence_length=128", "vram=24MiB", "accum=x32")
    outcome = call(*large, *MEASURE, *WANTED)
    assert outcome.row["fidelity"]["reference"]["parts"] > 1
    assert error(outcome.row) < 2e-6


@pytest.mark.slow
def test_a_reference_that_cannot_be_had(call: Call) -> None:
    """The point is as good as without it; the reason is in its row and beside the table."""
    large = (*TINY_RESNET, "train.batch_size=64", "data.image_size=64", "vram=24MiB", "accum=x32")
    outcome = call("-m", *large, *MEASURE, *WANTED)
    assert outcome.code == 0, outcome.said()
    (row,) = outcome.rows.values()
    assert row["status"] == "ok"
    assert row["fidelity"]["gradient_error"] is None
    assert row["fidelity"]["reason"].startswith("the reference fits in ")
    assert "its fidelity is not known: the reference fits in " in outcome.out


@pytest.mark.slow
def test_ctrl_c_meanwhile(start: Callable[..., Running], call: Call) -> None:
    """The point isn't final: typed again, it runs again."""
    sweep = ("-m", *TINY, "mode=measure", "measure.fidelity=true", "device=cpu", "seed=1")
    running = start(*sweep, "hydra.sweep.dir=sweep", "name=slow")
    running.wait_for("fidelity: started")
    running.signal_group()
    outcome = running.end()
    running.wait_until_gone(2)
    assert outcome.code == 75
    assert outcome.row["status"] == "interrupted"
    assert outcome.row["reason"] == "stopped while its fidelity was measured"
    again = call(*sweep, f"hydra.sweep.dir={outcome.folder.parent}")
    assert again.row["status"] == "ok"
    assert error(again.row) == 0


POINT = Point("0" * 16, "n", 0, Path(), {}, {})


def test_a_reference_that_was_killed_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By somebody else, or by the kernel: that says nothing of the training."""
    statuses = ["killed", "ok"]
    comparison = Comparison.__new__(Comparison)
    comparison.stop_signals, comparison.folder = lambda: 0, Path("fidelity")
    monkeypatch.setattr(Comparison, "run_once", lambda *_: SimpleNamespace(status=statuses.pop(0)))
    assert comparison.run(POINT, 1, None, is_reference=True).status == "ok"
    statuses += ["killed", "ok"]
    comparison.stop_signals = lambda: 1
    assert comparison.run(POINT, 1, None, is_reference=True).status == "killed"


def test_torchrun_is_refused() -> None:
    """Its processes are there already, and none can be had beside them."""
    config = {"measure": {"fidelity": True}, "process": "child"}
    with pytest.raises(Refused, match=r"^measure\.fidelity=true: must be false under torchrun \(sharding\.ranks=2"):
        check_fresh(config, Launch(0, 2, 0, 2))
    check_fresh(config, None)
    check_fresh({**config, "measure": {"fidelity": False}}, Launch(0, 2, 0, 2))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("measure.fidelity=true", "process=inline"),
            "measure.fidelity=true: must be false with process=inline, for it takes processes of its own",
        ),
        (("measure.fidelity=true", "measure.fidelity_steps=0"), "measure.fidelity_steps=0: must be at least 1"),
    ],
)
def test_what_is_refused(call: Call, words: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    outcome = call(*TINY, *words)
    assert outcome.sentence == sentence
    assert not list(tmp_path.iterdir())


def test_a_damaged_reference_is_run_again(tmp_path: Path) -> None:
    said: list[str] = []
    comparison: Any = SimpleNamespace(progress=SimpleNamespace(say=said.append))
    reference, file = Reference(comparison, Point("0" * 16, "n", 0, tmp_path, {}, {})), tmp_path / "x.json"
    assert (reference.kept(file), said) == (None, [])
    file.write_text(sealed('{"id": "x", "losses": [1.5, 2.5]}'))
    assert (reference.kept(file), said) == ([1.5, 2.5], [])
    another = sealed('{"id": "y", "losses": [1.5, 2.5]}')
    for text in (file.read_text().replace("1.5", "3.5"), file.read_text()[:15], "[]", "{}", "", another):
        file.write_text(text)
        assert reference.kept(file) is None
    assert said == [f"{file} is damaged, or another reference's: the reference is run again"] * 6
