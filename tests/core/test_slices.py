"""The slices of ranks, and that a batch that doesn't divide by their number is computed whole, each sample once."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import NamedTuple

import pytest
import torch
from torch import nn

from lowvram.core.assemble import assemble
from lowvram.core.knob import Knob
from lowvram.core.mesh import Ranks
from lowvram.core.rig import Part
from lowvram.core.slices import begin_in_batch, begin_of, most_in_slice, num_in_batch, weight_among_ranks
from lowvram.core.step import step
from lowvram.knobs.accum import Parts
from lowvram.knobs.depth.stochastic import StochasticDepth
from lowvram.knobs.sharding import FSDP
from lowvram.knobs.stepping import AfterBackward
from lowvram.tasks import Problem
from tests.laboratory import (
    CPU,
    PROBLEMS,
    InDouble,
    Trained,
    knobs_of,
    make_batch,
    my_slice,
    relative_error,
    train,
)
from tests.ranks import on_ranks

CLIPPED = AfterBackward(clip=0.5)  # far below the norms that come
Choices = dict[str, str | Knob]


@pytest.mark.parametrize(("length", "num_slices"), [(32, 2), (27, 2), (27, 4), (5, 3), (2, 4)])
def test_slices_are_those_of_tensor_split(length: int, num_slices: int) -> None:
    wanted = [len(part) for part in torch.arange(length).tensor_split(num_slices)]
    begins = [begin_of(length, index, num_slices) for index in range(num_slices + 1)]
    assert [end - begin for begin, end in pairwise(begins)] == wanted
    assert most_in_slice(length, num_slices) == max(wanted) == wanted[0]


def test_a_rank_knows_the_samples_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "size", 4)
    weights = list[float]()
    for rank, (begin, size) in enumerate([(0, 3), (3, 3), (6, 2), (8, 2)]):
        monkeypatch.setattr(Ranks, "rank", rank)
        parts = Parts(2).split(Part(torch.zeros(size, 1), torch.zeros(size), num_in_batch=10))
        assert (begin_in_batch(parts), num_in_batch(parts)) == (begin, 10)
        weights.append(weight_among_ranks(parts) or 0.0)
        equal = Parts(2).split(Part(torch.zeros(3, 1), torch.zeros(3)))
        assert (begin_in_batch(equal), num_in_batch(equal), weight_among_ranks(equal)) == (3 * rank, 12, None)
    assert weights == pytest.approx([1.2, 1.2, 0.8, 0.8])


class Case(NamedTuple):
    """What several ranks do, and one process has to do as well."""

    problem: str
    choices: Choices
    sizes: list[int]


def train_cases(cases: list[Case]) -> list[Trained]:
    return [train(InDouble(PROBLEMS[case.problem]), knobs_of(**case.choices), case.sizes) for case in cases]


def check(cases: list[Case], num_ranks: int) -> None:
    """That ranks compute what one process computes, without parts, to the rounding of fp64."""
    alone = [case._replace(choices={**case.choices, "sharding": "none", "accum": "none"}) for case in cases]
    wanted = train_cases(alone)
    for found in on_ranks(train_cases, cases, num_ranks=num_ranks):
        for case, one, other in zip(cases, found, wanted, strict=True):
            losses = [{"": torch.stack(each.losses)} for each in (one, other)]
            assert relative_error(*losses) < 1e-12, case
            assert relative_error(one.gradients, other.gradients) < 1e-12, case
            assert relative_error(one.buffers, other.buffers) < 1e-12, case
            norms = [float(update.grad_norm) for update in other.updates]
            assert [float(update.grad_norm) for update in one.updates] == pytest.approx(norms, rel=1e-12), case


@pytest.mark.medium
def test_no_sample_is_lost_or_counted_twice() -> None:
    """Slices of 4, 3 and 3 samples, in parts of 2 and 1; and of 3, 3 and 2 samples. One of the points draws for each
    sample what the whole batch would draw for it."""
    depth: Choices = {"depth": StochasticDepth(rate=0.5)}
    common: Choices = {"optimizer": "sgd", "stepping": CLIPPED}
    cases = [
        Case("transformer", {**common, "sharding": option, "accum": "x2", **more}, [10, 8])
        for option, more in (("ddp", depth), ("fsdp", {}))
    ]
    check(cases, 3)


def drawn(random: Random, num_ranks: int) -> Case:
    num_parts = random.randint(1, 4)
    hsdp: Choices = {"sharding": FSDP(replicate=2)}
    options: list[Choices] = [{"sharding": each} for each in ("ddp", "zero1", "fsdp")]
    choices: Choices = {
        **random.choice([*options, hsdp] if num_ranks == 4 else options),
        "accum": Parts(num_parts),
        "stepping": random.choice(["after_backward", CLIPPED]),
        "optimizer": random.choice(["sgd", "adamw"]),
        "ckpt": random.choice(["none", "every1"]),
    }
    sizes = [random.randint(num_ranks * num_parts, num_ranks * num_parts * 3) for _ in range(3)]
    return Case(random.choice(["transformer", "resnet_group", "resnet_frozen"]), choices, sizes)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20261128, 20261128 + 12))
def test_any_batch_on_any_ranks_in_any_parts(seed: int) -> None:
    random = Random(seed)
    num_ranks = random.choice([2, 3, 4])
    check([drawn(random, num_ranks) for _ in range(6)], num_ranks)


# Batch norm


def statistics_after_a_step(task: Problem, choices: Choices, num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the first batch norm, whose inputs don't depend on other norms."""
    rig = assemble(task, knobs_of(**choices), CPU)
    step(rig, my_slice(make_batch(task.spec, num_samples, dtype=torch.float64)))
    norm = next(module for module in rig.model.modules() if isinstance(module, nn.BatchNorm2d))
    assert norm.running_mean is not None
    assert norm.running_var is not None
    return norm.running_mean, norm.running_var


@pytest.mark.medium
def test_the_statistics_of_batch_norm_are_weighed_by_samples() -> None:
    """The mean is that of the whole batch; the variance is that within slices, without that between them."""
    task = InDouble(PROBLEMS["resnet"])
    mean, _ = statistics_after_a_step(task, {}, 5)  # pyright: ignore[reportArgumentType]
    found = on_ranks(statistics_after_a_step, task, {"sharding": "ddp"}, 5, num_ranks=3)
    for its_mean, its_variance in found:
        torch.testing.assert_close(its_mean, mean, rtol=1e-12, atol=1e-15)
        assert torch.equal(its_variance, found[0][1])
