"""Private names of torch.distributed.pipelining."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.compat.sentences import needed
from tests.ranks import one_rank_alone


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero_bubble"])
def test_a_schedule_calls_what_a_stage_is_to_do(name: str) -> None:
    told(name)


@needed("torch.distributed.pipelining.stage._PipelineStageBase", by="sharding=pipeline")
def told(name: str) -> None:
    import torch.distributed as dist

    from lowvram.compat.torch_pipelining import PartsStage, Work, run_schedule, schedule_of

    weight, done = torch.ones(2, requires_grad=True), list[str]()

    class Doubling(Work):
        def room(self, part: int) -> Tensor:
            raise AssertionError("the first stage receives nothing")

        def forward(self, part: int, received: Tensor | None) -> Tensor:
            assert received is None
            done.append(f"forward {part}")
            return (2 * weight).sum()

        def backward(self, part: int, made: Tensor, gradient: Tensor | None, holds_back: bool) -> None:
            assert gradient is None
            assert holds_back == (name == "zero_bubble")
            done.append(f"backward {part}")
            if not holds_back:
                done.append(f"weights {part}")
            made.backward()

        def weights(self, part: int) -> None:
            done.append(f"weights {part}")

    with one_rank_alone():
        group = dist.group.WORLD
        assert isinstance(group, dist.ProcessGroup)
        stage = PartsStage(Doubling(), 0, 1, torch.device("cpu"), group)
        for _ in range(2):
            run_schedule(schedule_of(name, [stage], 3), 3)
    assert weight.grad is not None
    assert weight.grad.tolist() == [12.0, 12.0]
    ways = "forward", "backward", "weights"
    assert sorted(done) == sorted(2 * [f"{way} {part}" for way in ways for part in range(3)])
    last = done.index("forward 2")
    assert ("weights 0" in done[:last]) == (name != "gpipe")
