"""train.rehearse=true: memory runs out before training or not at all, and training is the same afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.calls import TINY, TINY_RESNET, Outcome, history
from tests.tiers import first_of

pytestmark = pytest.mark.medium
Call = Callable[..., Outcome]

OPTIONS = {
    "noise": [*TINY, "model.dropout=0.2", "activations=int8", "precision=bf16_split"],
    "statistics": [*TINY_RESNET, "accum=x2", "stepping.clip=0.5"],
    "blocks in turn": [*TINY, "adapter=badam", "model.num_layers=3"],
    "skipped blocks": [*TINY, "depth=layer_drop", "model.num_layers=3"],
    "updates in the backward pass": [*TINY, "stepping=in_backward", "optimizer=adamw"],
    "updates on the host": [*TINY, "stepping=cpu_offload"],
    "states in few bits": [*TINY, "optimizer=adamw_8bit"],
    "weights in few bits": [*TINY, "adapter=qlora"],
    "random directions": [*TINY, "stepping=zeroth_order"],
    "a limit": [*TINY, "vram=1GiB"],
    "growing batches": [*TINY, "train.batch_size=8", "schedule.batch_start=2", "schedule.batch_warmup_samples=9"],
    "compiled": [*TINY, "compile=blocks", "compile.backend=aot_eager", "model.dropout=0.2"],
    "loss scaling": [*TINY, "precision=fp16"],
    "ranks": [*TINY, "sharding=fsdp", "sharding.ranks=2", "model.dropout=0.2"],
    "stages": [*TINY, "model.num_layers=2", "sharding=pipeline", "sharding.ranks=2", "accum=x2"],
    "split layers": [*TINY, "sharding=tensor", "sharding.ranks=2"],
}


@pytest.mark.parametrize("name", first_of([*OPTIONS], 3))
def test_training_is_the_same_to_the_bit(call: Call, name: str) -> None:
    plain = call(*OPTIONS[name], "hydra.run.dir=plain")
    rehearsed = call(*OPTIONS[name], "train.rehearse=true", "hydra.run.dir=rehearsed")
    assert plain.code == rehearsed.code == 0, rehearsed.said()
    assert "rehearsed: a step of the heaviest batch" in rehearsed.out
    one, other = rehearsed.folders
    assert history(one) == history(other)
    (path,) = (each.relative_to(one) for each in (one / "model").glob("*.safetensors"))
    assert (one / path).read_bytes() == (other / path).read_bytes()


UNEVEN = ("data.pattern=*.txt", "data.samples=documents", "loader=bucketed", "train.steps=2")


def mostly_short(folder: Path) -> tuple[str, ...]:
    """The words for texts of which one is long; a run of two steps doesn't meet it."""
    folder.mkdir()
    for number in range(200):
        (folder / f"{number}.txt").write_text("text " * (100 if number == 70 else 8))
    return (*TINY, "data=text", f"data.path={folder}", *UNEVEN, "data.sequence_length=512", "model.context=512")


def test_the_longest_texts_are_met_before_training(call: Call, tmp_path: Path) -> None:
    done = call(*mostly_short(tmp_path / "texts"), "train.rehearse=true")
    memory = done.row["memory"]
    assert memory["rehearsed_peak_bytes"] > memory["peak_bytes"]
    assert memory["rehearsed_peak_bytes"] <= 1.01 * done.row["plan"]["allocated_bytes"]


def test_memory_runs_out_before_the_first_step(call: Call, tmp_path: Path) -> None:
    words = (*mostly_short(tmp_path / "texts"), "train.rehearse=true")
    needed = call(*words, "hydra.run.dir=a").row["memory"]
    budget = (needed["rehearsed_peak_bytes"] + needed["peak_bytes"]) // 2
    failed = call(*words, f"vram={budget / 2**30:.9f}GiB", "plan.skip=false", "hydra.run.dir=b")
    assert failed.row["status"] == "oom", failed.said()
    assert not (failed.folder / "metrics.jsonl").exists()  # which begins with training


def test_more_parts_are_tried_if_the_rehearsal_runs_out_of_memory(call: Call, tmp_path: Path) -> None:
    words = (*mostly_short(tmp_path / "texts"), "train.rehearse=true", "accum=auto", "train.batch_size=8")
    whole = call(*words, "hydra.run.dir=a").row["memory"]["rehearsed_peak_bytes"]
    done = call(*words, f"vram={0.9 * whole / 2**30:.9f}GiB", "hydra.run.dir=b")
    assert done.row["status"] == "ok", done.said()
    assert [attempt["parts"] for attempt in done.row["attempts"]][:1] == [1], done.row["attempts"]
    assert done.row["config"]["accum"]["parts"] > 1
    assert done.row["memory"]["rehearsed_peak_bytes"] < whole


OWN = """
import torch
from torch import nn

OWN = torch.Generator().manual_seed(5)


class Net(nn.Module):
    def __init__(self, vocab_size: int, drawn: int = 0) -> None:
        super().__init__()
        torch.rand(drawn, generator=OWN)
        self.embed, self.head = nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size)

    def forward(self, ids):
        return self.head(self.embed(ids) + 0.1 * torch.randn(8, generator=OWN))
"""


@pytest.mark.slow
def test_a_generator_in_the_models_file_is_put_back(train: Call, tmp_path: Path) -> None:
    (tmp_path / "drawing.py").write_text(OWN)
    words = [word for word in TINY if not word.startswith("model.")]
    words += ["model=external", "model.target=drawing.Net", "model.reads=TOKENS"]
    env = {"PYTHONPATH": str(tmp_path)}
    for each in ("false", "true"):
        folder = f"hydra.run.dir=is_{each}"
        done = train(*words, "model.args={vocab_size: 256}", f"train.rehearse={each}", folder, env=env)
        assert done.code == 0, done.said()
    assert history(tmp_path / "is_false") == history(tmp_path / "is_true")
    refused = train(*words, "model.args={vocab_size: 256, drawn: 3}", "train.rehearse=true", env=env)
    assert "train.rehearse=true: must be false for this model" in refused.out + refused.err, refused.said()
