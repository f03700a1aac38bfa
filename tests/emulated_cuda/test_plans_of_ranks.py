"""Plans for several cards beside torch's allocator on each of them, emulated or real."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.calls import TINY, Outcome

Call = Callable[..., Outcome]
pytestmark = [
    pytest.mark.emulated,
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]
MEASURED = ("mode=measure", "measure.warmup_steps=1", "measure.steps=1", "device=cuda", "sharding.ranks=2")
LARGER = (
    "model.num_layers=4",
    "model.width=256",
    "model.num_heads=4",
    "train.batch_size=8",
    "data.sequence_length=128",
)
MESHES = [
    ["sharding=ddp"],
    ["sharding=zero1"],
    ["sharding=fsdp"],
    ["sharding=fsdp", "accum=x2", "precision=bf16", "ckpt=every1"],
    ["sharding=fsdp", "sharding.context=2"],
    ["sharding=tensor"],
    ["sharding=tensor", "sharding.sequence=true"],
    ["sharding=context"],
    ["sharding=pipeline", "accum=x4"],
    ["sharding=pipeline", "accum=x4", "sharding.schedule=interleaved", "sharding.stages=2"],
    ["sharding=pipeline", "accum=x4", "sharding.schedule=zero_bubble"],
]


@pytest.mark.parametrize("mesh", MESHES, ids=" ".join)
def test_a_card_takes_what_is_planned(train: Call, mesh: list[str], record_property: Callable[..., None]) -> None:
    row = train(*TINY, *LARGER, *MEASURED, *mesh, timeout_s=300).row
    assert row["status"] == "ok", row["reason"]
    plan, memory = row["plan"], row["memory"]
    assert plan["allocated_bytes"] == pytest.approx(memory["peak_bytes"], rel=0.001)
    assert plan["reserved_bytes"] == pytest.approx(memory["reserved_bytes"], rel=0.015)
    record_property("points", 1)
