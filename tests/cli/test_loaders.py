"""Texts of uneven lengths from the command line: bucketed, packed, refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.calls import Outcome, history, read_row

Call = Callable[..., Outcome]
TINY = (
    "model.num_layers=1",
    "model.width=32",
    "model.num_heads=2",
    "data=hub",
    "data.samples=documents",
    "data.sequence_length=32",
    "data.eval_samples=8",
    "train.batch_size=8",
    "logger=none",
)
STEPS = ("train.steps=7", "train.eval_every=2", "snapshot.every_steps=2", "seed=3")
LOADERS = ("inline", "bucketed", "packed")


@pytest.fixture
def texts(tmp_path: Path) -> str:
    """Sixty texts of 4 to 40 letters; the word that names them."""
    lines = (json.dumps({"text": chr(97 + number % 26) * (4 + number * number % 37)}) for number in range(60))
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join(lines))
    return f"data.name={file}"


@pytest.mark.slow
@pytest.mark.parametrize("loader", ["bucketed", "packed"])
def test_a_killed_run_with_workers_goes_on_to_the_last_digit(
    call: Call, texts: str, tmp_path: Path, loader: str
) -> None:
    """Killed before step 6, so step 5 is logged but not in a snapshot; the whole run has no workers."""
    words = (*TINY, texts, *STEPS, f"loader={loader}", "accum=x2")
    whole = call(*words, "hydra.run.dir=outputs/whole")
    assert whole.code == 0, whole.said()
    killed = call(*words, "loader.num_workers=2", "hydra.run.dir=outputs/killed", "name=kill@6")
    assert killed.row["status"] == "killed"
    resumed = call("resume=last", "name=null")
    assert resumed.code == 0, resumed.said()
    assert history(tmp_path / "outputs" / "killed") == history(tmp_path / "outputs" / "whole")
    weights = [(tmp_path / "outputs" / run / "model" / "model.safetensors").read_bytes() for run in ("whole", "killed")]
    assert weights[0] == weights[1]


@pytest.mark.slow
@pytest.mark.parametrize("loader", ["bucketed", "packed"])
def test_two_ranks_learn_what_one_learns(call: Call, texts: str, loader: str) -> None:
    """Each has rows of its own; the sequences of a batch, and so the update, are the same."""
    words = ("-m", *TINY, texts, *STEPS, f"loader={loader}", "device=cpu")
    call(*words)
    outcome = call(*words, "sharding=ddp", "sharding.ranks=2", "hydra.sweep.dir=both")
    assert outcome.code == 0, outcome.said()
    one, two = map(losses, outcome.folders)
    assert len(one) > 7
    assert two == pytest.approx(one, rel=1e-5)


def losses(folder: Path) -> list[float]:
    """Of training and of evaluations, in their order."""
    return [value for line in history(folder) for name, value in line.items() if name in ("loss/train", "loss/eval")]


@pytest.mark.slow
def test_padding_is_measured_and_the_loss_is_the_same(call: Call, texts: str, tmp_path: Path) -> None:
    words = (*TINY, texts, "train.steps=4", f"loader={','.join(LOADERS)}", "hydra.sweep.dir=outputs/sweep")
    outcome = call("-m", *words)
    assert outcome.code == 0, outcome.said()
    rows = {row["choices"]["loader"]: row for row in map(read_row, (tmp_path / "outputs" / "sweep").glob("*/"))}
    padding = {name: row["data"]["padding"] for name, row in rows.items()}
    assert padding["inline"] > 0.3
    assert max(padding["bucketed"], padding["packed"]) < padding["inline"] / 2
    for which in ("first", "last", "eval"):
        assert rows["packed"]["loss"][which] == pytest.approx(rows["inline"]["loss"][which], abs=1e-5)
    assert "padding" in (tmp_path / "outputs" / "sweep" / "table.md").read_text().splitlines()[0]
    for row in rows.values():
        assert row["memory"]["peak_bytes"] <= row["plan"]["allocated_bytes"]
    lines = [history(Path(folder)) for folder in (tmp_path / "outputs" / "sweep").glob("*/") if folder.is_dir()]
    assert all("data/padding" in line for history_of_run in lines for line in history_of_run if "loss/train" in line)


def test_what_has_no_lengths_is_refused(call: Call) -> None:
    refused = call("loader=packed", "logger=none")
    assert refused.code == 3
    assert "loader='packed': must be inline or workers for samples that are all of one length" in refused.said()
    refused = call("loader=bucketed", "model=resnet", "logger=none")
    assert refused.code == 3
    assert "loader='bucketed': must be inline or workers for images" in refused.said()
