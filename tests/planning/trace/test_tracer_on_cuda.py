"""What was planned, and what a card's allocator says."""

from __future__ import annotations

import gc

import pytest
import torch

from lowvram.core.assemble import assemble
from lowvram.core.device import card_of
from lowvram.core.knob import Knob
from lowvram.core.step import step
from lowvram.data.spec import DataSpec, Modality
from lowvram.models.transformer import TransformerConfig
from lowvram.planning.target import Target
from lowvram.planning.trace.tracer import trace
from lowvram.tasks import Auto
from tests.laboratory import PROBLEMS, knobs_of, make_batch, needs_gpu

pytestmark = needs_gpu

PROBLEM = Auto().pose(TransformerConfig(4, 512, 8, 256), DataSpec(Modality.TOKENS, 8192, (256,)))
CHOICES: list[dict[str, str | Knob]] = [
    {},
    {"precision": "bf16"},
    {"precision": "fp16", "accum": "x2"},
    {"precision": "bf16", "ckpt": "every1"},
    {"precision": "bf16_pure", "optimizer": "sgd"},
    {"logits": "chunked", "stepping": "in_backward"},
    {"offload": "activations"},
    {"stepping": "cpu_offload"},
]


def allocated(choices: dict[str, str | Knob], batch_size: int) -> int:
    """The allocator's peak over a build and two steps, beyond what was there, libraries' workspaces among it."""
    device = torch.device("cuda")
    torch.nn.functional.linear(
        *(torch.ones(64, 64, device=device, requires_grad=True) for _ in range(2))
    ).sum().backward()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    rig = assemble(PROBLEM, knobs_of(**choices), device)
    for _ in range(2):
        step(rig, make_batch(PROBLEM.spec, batch_size).to(device))
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_a_card_holds_what_was_planned(choices: dict[str, str | Knob]) -> None:
    planned = trace(PROBLEM, knobs_of(**choices), 16, Target(card_of(torch.device("cuda")))).sums()
    assert planned.peak_bytes == pytest.approx(allocated(choices, 16), rel=0.05)


def test_on_a_machine_with_a_card_plans_touch_no_memory_of_it() -> None:
    before = torch.cuda.memory_allocated()
    trace(PROBLEMS["resnet"], knobs_of(), 8, Target(card_of(torch.device("cuda"))))
    assert torch.cuda.memory_allocated() == before
