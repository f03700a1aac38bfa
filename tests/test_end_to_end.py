"""What a user gets from one command: a whole row, metrics, a run in W&B, weights that load into a plain model."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from lowvram.data.loader import eval_batches
from lowvram.data.python_source import PythonSource
from lowvram.loops.export.folder import load
from lowvram.results.row import empty_row

QUICK = ("data.eval_samples=16", "train.batch_size=8")
TINY = ("model.num_layers=2", "model.width=32", "model.num_heads=2", "data.sequence_length=32")


def missing(row: dict[str, Any], schema: dict[str, Any], path: str = "") -> list[str]:
    """The keys of the schema that a row lacks."""
    lacks = [path + key for key in schema if key not in row]
    inner = [(key, value) for key, value in schema.items() if isinstance(value, dict) and key in row]
    return lacks + [found for key, value in inner for found in missing(row[key], value, f"{path}{key}.")]


def test_a_run_leaves_everything_it_promises(call: Any) -> None:
    run = call("train.steps=150", "optimizer.lr=0.01", "data=python_source", *TINY, *QUICK, "train.batch_size=32")
    assert run.code == 0, run.said()
    row = run.row
    assert missing(row, empty_row()) == []
    assert row["status"] == "ok"
    assert row["memory"]["source"] == "tensor_ledger"
    assert row["memory"]["peak_bytes"] == sum(row["memory"]["by_kind"].values())
    assert row["throughput"]["tokens_per_s"] == pytest.approx(32 * row["throughput"]["samples_per_s"])
    assert row["time"]["step_ms_p05"] <= row["time"]["step_ms_p50"] <= row["time"]["step_ms_p95"]
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss/train" in line] == list(range(1, 151))
    assert row["loss"]["eval"] < byte_entropy() < row["loss"]["first"]
    assert row["eval"]["perplexity"] == pytest.approx(math.exp(row["loss"]["eval"]))
    assert plain_eval_loss(load(run.folder / "model")) == pytest.approx(row["loss"]["eval"], abs=1e-6)
    assert list(run.folder.glob("wandb/offline-run-*/*.wandb"))
    assert "wandb sync" in run.out.replace("-m wandb", "wandb")


def byte_entropy() -> float:
    """Entropy of single bytes of the held-out text, in nats: what knowing their frequencies alone would reach."""
    data = PythonSource(sequence_length=32, eval_samples=16).open(0)
    counts = Counter(torch.cat([data.eval.sample(i, 0)[1] for i in range(len(data.eval))]).tolist())
    total = sum(counts.values())
    return -sum(count / total * math.log(count / total) for count in counts.values())


def plain_eval_loss(model: torch.nn.Module) -> float:
    """The evaluation as anybody would write it."""
    data = PythonSource(sequence_length=32, eval_samples=16).open(0)
    model.eval()
    with torch.no_grad():
        ((part, _),) = eval_batches(data.eval, 16, torch.device("cpu"))
        return F.cross_entropy(model(part.inputs).flatten(0, 1), part.targets.flatten()).item()


def test_text_of_ones_own(call: Any, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(3):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number}: the quick brown fox, à la carte. " * 200)
    run = call("train.steps=30", "logger=none", "data=text", f"data.path={tmp_path}/texts", *TINY, *QUICK)
    assert run.code == 0, run.said()
    assert run.row["loss"]["eval"] < run.row["loss"]["first"] - 1


@pytest.mark.slow
def test_images_of_ones_own(call: Any, tmp_path: Path) -> None:
    for name, colour in {"red": (200, 30, 30), "blue": (30, 30, 200)}.items():
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(12):
            Image.new("RGB", (40, 30 + number), colour).save(tmp_path / "images" / name / f"{number}.png")
    words = ["model=resnet", "model.layers=[1,1]", "model.width=8", "data=imagefolder", "data.image_size=16"]
    run = call("train.steps=20", "logger=none", *words, f"data.path={tmp_path}/images", *QUICK)
    assert run.code == 0, run.said()
    assert run.row["eval"]["accuracy"] == 1.0
