"""in_backward and cpu_offload against a loop as anybody would write it, with each of what must go with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from lowvram.core.assemble import assemble
from lowvram.core.knob import Knob
from lowvram.core.step import step
from lowvram.knobs.accum import Parts
from lowvram.knobs.precision import Fp16
from lowvram.knobs.stepping import AfterBackward, CpuOffload, InBackward, Norm
from tests.laboratory import (
    CPU,
    KNOBS,
    PROBLEMS,
    InDouble,
    Trained,
    batches,
    knobs_of,
    make_batch,
    relative_error,
    train,
)

pytestmark = [pytest.mark.medium, pytest.mark.sampled(3)]

SIZES = [8] * 20
CLIP = 0.3  # below the norms of these steps
Make = Callable[[float | None], Knob]
STEPPINGS: dict[str, Make] = {
    "in_backward": lambda clip: InBackward(clip),
    "in_backward, two passes": lambda clip: InBackward(clip, Norm.two_passes),
    "cpu_offload": lambda clip: CpuOffload(clip),
    "cpu_offload, half": lambda clip: CpuOffload(clip, 0.5),
    "cpu_offload, nothing": lambda clip: CpuOffload(clip, 0.0),
}


@dataclass(frozen=True)
class Case:
    """What else is chosen."""

    clip: float | None = None
    parts: int = 1
    is_scheduled: bool = False
    ckpt: str = "none"


CASES = {
    "alone": Case(),
    "clip": Case(clip=CLIP),
    "accum": Case(parts=4),
    "schedule": Case(is_scheduled=True),
    "ckpt": Case(ckpt="every1"),
    "all at once": Case(CLIP, 4, True, "every1"),
}


def lr_of(index: int, is_scheduled: bool) -> float:
    return 1e-3 * (1 - index / len(SIZES) if is_scheduled else 1.0)


@cache
def plain_loop(problem: str, case: Case, optimizer: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The parameters after all steps of a loop in plain torch, which recomputes nothing."""
    task: Any = InDouble(PROBLEMS[problem]) if dtype is torch.float64 else PROBLEMS[problem]
    model = assemble(task, {}, CPU).model
    makes: Any = KNOBS["optimizer", optimizer]
    updates = makes.make(list(model.parameters()))
    for index, batch in enumerate(batches(task.spec, SIZES, dtype)):
        for group in updates.param_groups:
            group["lr"] = lr_of(index, case.is_scheduled)
        for part in Parts(case.parts).split(batch):
            (task.criterion(model(part.inputs), part) / batch.num_targets).backward()
        if case.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        updates.step()
        updates.zero_grad()
    return dict(model.named_parameters())


def ours(problem: str, stepping: str, case: Case, optimizer: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    task: Any = InDouble(PROBLEMS[problem]) if dtype is torch.float64 else PROBLEMS[problem]
    choices: Any = {"stepping": STEPPINGS[stepping](case.clip), "accum": Parts(case.parts), "ckpt": case.ckpt}
    rig = assemble(task, knobs_of(optimizer=optimizer, **choices), CPU)
    for index, batch in enumerate(batches(task.spec, SIZES, dtype)):
        rig.stepper.set_lr(lr_of(index, case.is_scheduled))
        assert step(rig, batch)[1].applied
        assert all(parameter.grad is None for parameter in rig.model.parameters())
    return dict(rig.model.named_parameters())


def reference_of(case: Case) -> Case:
    return Case(case.clip, case.parts, case.is_scheduled)


MAIN = ["in_backward", "cpu_offload"]
TRIED = [(each, case) for each in STEPPINGS for case in CASES if each in MAIN or case in ("clip", "all at once")]


@pytest.mark.sampled
@pytest.mark.parametrize("problem", ["transformer", "resnet"])
@pytest.mark.parametrize(("stepping", "name"), TRIED)
def test_adamw_in_fp64_ends_at_the_plain_loops_parameters(problem: str, stepping: str, name: str) -> None:
    case = CASES[name]
    wanted = plain_loop(problem, reference_of(case), "adamw", torch.float64)
    assert relative_error(ours(problem, stepping, case, "adamw", torch.float64), wanted) <= 1e-10


@pytest.mark.parametrize("problem", ["transformer", "resnet"])
@pytest.mark.parametrize("stepping", MAIN)
@pytest.mark.parametrize("case", ["alone", "all at once"])
def test_sgd_in_fp32_ends_at_the_plain_loops_parameters(problem: str, stepping: str, case: str) -> None:
    wanted = plain_loop(problem, reference_of(CASES[case]), "sgd", torch.float32)
    assert relative_error(ours(problem, stepping, CASES[case], "sgd", torch.float32), wanted) <= 1e-6


def test_clipping_and_the_schedule_are_felt() -> None:
    """Else the tests above would say nothing of them."""
    plain = plain_loop("transformer", Case(), "adamw", torch.float64)
    for case in (Case(clip=CLIP), Case(is_scheduled=True)):
        assert relative_error(plain_loop("transformer", case, "adamw", torch.float64), plain) > 1e-4


# fp16: the same steps are skipped. The scale overflows in the first steps, and again when it grows.


@cache
def in_fp16(problem: str, stepping: Knob, accum: str, ckpt: str) -> Trained:
    choices: dict[str, str | Knob] = {"precision": Fp16(2.0**30, growth_interval=2), "accum": accum, "ckpt": ckpt}
    return train(PROBLEMS[problem], knobs_of(optimizer="sgd", stepping=stepping, **choices), SIZES, lr=0.01)


@pytest.mark.sampled
@pytest.mark.parametrize("problem", ["transformer", "resnet"])
@pytest.mark.parametrize("stepping", STEPPINGS)
@pytest.mark.parametrize(("clip", "accum", "ckpt"), [(None, "none", "none"), (CLIP, "x4", "every1")])
def test_with_fp16_the_same_steps_are_skipped(
    problem: str, stepping: str, clip: float | None, accum: str, ckpt: str
) -> None:
    found = in_fp16(problem, STEPPINGS[stepping](clip), accum, ckpt)
    wanted = in_fp16(problem, AfterBackward(clip), accum, "none")
    applied = [update.applied for update in wanted.updates]
    assert [update.applied for update in found.updates] == applied
    assert not applied[0]
    assert 2 < sum(applied) < len(applied)
    assert relative_error(found.parameters, wanted.parameters) <= 1e-6
    losses = [torch.stack(trained.losses) for trained in (found, wanted)]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)


@pytest.mark.parametrize("stepping", STEPPINGS)
@pytest.mark.parametrize("accum", ["none", "x4"])
def test_frozen_parameters_and_those_without_a_gradient_are_left_alone(stepping: str, accum: str) -> None:
    task = PROBLEMS["transformer"]
    plain, other = (frozen_and_unused(knob, accum) for knob in (AfterBackward(CLIP), STEPPINGS[stepping](CLIP)))
    assert relative_error(other, plain) <= 1e-6
    before = dict(assemble(task, knobs_of(), CPU).model.named_parameters())
    same = {name for name, value in other.items() if torch.equal(value, before[name])}
    assert same == {name for name in before if name.startswith("blocks.1.")}


def frozen_and_unused(stepping: Knob, accum: str) -> dict[str, torch.Tensor]:
    """Parameters after two steps in which one block is skipped, half of it frozen as well."""
    rig = assemble(PROBLEMS["transformer"], knobs_of(optimizer="sgd", stepping=stepping, accum=accum), CPU)
    block = rig.structure.blocks[1]
    block.forward = lambda x: x
    for parameter in list(block.parameters())[::2]:
        parameter.requires_grad_(False)
    for seed in range(2):
        step(rig, make_batch(PROBLEMS["transformer"].spec, 8, seed))
    return dict(rig.model.named_parameters())


@pytest.mark.parametrize("stepping", STEPPINGS)
@pytest.mark.parametrize("accum", ["none", "x4"])
def test_tied_weights_are_updated_once(stepping: str, accum: str) -> None:
    task = PROBLEMS["transformer"]
    model = task.make_model()
    assert len(list(model.named_parameters())) < len(list(model.named_parameters(remove_duplicate=False)))
    trained = train(task, knobs_of(stepping=STEPPINGS[stepping](CLIP), accum=accum), [8, 8])
    assert all(len(steps) == 2 for steps in trained.gradients.values())
