"""ema=device: averages of the weights are torch's, and change nothing of the training."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lowvram.config.errors import BadInput, Incompatible
from lowvram.core import host
from lowvram.core.assemble import assemble
from lowvram.core.kind import Kind
from lowvram.core.rig import Rig
from lowvram.core.shards import local, whole
from lowvram.core.states import gathered, load_whole
from lowvram.core.step import step
from lowvram.core.stepper import StepperAround, Update
from lowvram.knobs.ema import Averages, AveragingStepper, NoAverages
from lowvram.knobs.stepping import AfterBackward
from tests.laboratory import (
    CPU,
    MODELS,
    PROBLEMS,
    batches,
    knobs_of,
    my_slice,
    peak_as_measured,
    peak_as_planned,
    relative_error,
)
from tests.ranks import on_ranks

pytestmark = pytest.mark.medium
SIZES = [8, 8, 7, 8, 8]
WAYS: list[dict[str, Any]] = [
    {},
    {"accum": "x2", "stepping": AfterBackward(clip=0.3)},
    {"stepping": "in_backward"},
    {"stepping": "cpu_offload"},
    {"optimizer": "adamw_companded"},
    {"adapter": "lora"},
]


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(weight).clone() for name, weight in model.named_parameters()}


def averages_of(rig: Rig) -> dict[str, Tensor]:
    assert rig.averaged is not None
    with rig.averaged():
        return parameters_of(rig.model)


def trained(problem: str, averages: Averages, sizes: list[int] | None = None, **choices: Any) -> Rig:
    task = PROBLEMS[problem]
    rig = assemble(task, knobs_of(ema=averages, **choices), CPU)
    for part in map(my_slice, batches(task.spec, sizes or SIZES)):
        step(rig, part)
    return rig


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_averages_are_those_of_torch_to_the_bit(way: dict[str, Any], every: int) -> None:
    for problem in MODELS if not way else MODELS[-1:]:
        task = PROBLEMS[problem]
        plain, ours = assemble(task, knobs_of(**way), CPU), trained(problem, Averages(0.9, every), **way)
        wanted = None
        for number, part in enumerate(batches(task.spec, SIZES), start=1):
            step(plain, part)
            if number % every == 0:
                wanted = wanted or AveragedModel(plain.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
                wanted.update_parameters(plain.model)
        assert wanted is not None
        assert relative_error(averages_of(ours), parameters_of(wanted.module)) == 0
        assert relative_error(parameters_of(ours.model), parameters_of(plain.model)) == 0
        # As torch's by default, buffers aren't averaged: both have the model's own.
        buffers, own = (dict(model.named_buffers()) for model in (wanted.module, ours.model))
        assert every > 1 or relative_error(own, buffers) == 0


def test_averages_wait_where_the_weights_do() -> None:
    wanted, ours = (trained("transformer", Averages(0.9), offload=each) for each in ("none", "parameters"))
    assert relative_error(averages_of(ours), averages_of(wanted)) == 0
    stepper: Any = ours.stepper
    assert all(host.holds(local(average)) for average in stepper.averages)


def test_weights_of_16_bits_are_averaged_in_fp32() -> None:
    """In bf16 a step of 0.001 of a difference would be lost."""
    task = PROBLEMS["transformer"]
    choices: dict[str, Any] = {"precision": "bf16_pure"}
    plain, ours = assemble(task, knobs_of(**choices), CPU), trained("transformer", Averages(0.999), **choices)
    wanted = dict[str, Tensor]()
    for part in batches(task.spec, SIZES):
        step(plain, part)
        now = {name: weight.float() for name, weight in parameters_of(plain.model).items()}
        wanted = {name: wanted.get(name, weight).lerp(weight, 1 - 0.999) for name, weight in now.items()}
    stepper: Any = ours.stepper
    found = dict(zip(wanted, stepper.averages, strict=True))
    assert all(average.dtype is torch.float32 for average in found.values())
    assert relative_error(found, wanted) < 1e-7
    rounded = {name: weight.bfloat16() for name, weight in wanted.items()}
    assert relative_error(averages_of(ours), rounded) < 1e-4


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"precision": "bf16_pure", "stepping": "cpu_offload"},
        {"precision": "bf16_split"},
        {"stepping": "in_backward"},
    ],
    ids=str,
)
def test_putting_averages_in_place_changes_nothing_of_the_training(choices: dict[str, Any]) -> None:
    task = PROBLEMS["transformer"]
    looked, alone = (assemble(task, knobs_of(ema=Averages(0.9), **choices), CPU) for _ in range(2))
    for part in batches(task.spec, SIZES):
        for rig in (looked, alone):
            step(rig, part)
        averages_of(looked)
    assert relative_error(parameters_of(looked.model), parameters_of(alone.model)) == 0
    assert relative_error(averages_of(looked), averages_of(alone)) == 0


class Skipping(StepperAround):
    """Has changed no weight, where it says so."""

    def update(self) -> Update:
        update = self.inner.update()
        return update._replace(applied=False, recoverable=True)


def test_a_skipped_step_counts_for_no_average() -> None:
    rig = trained("transformer", Averages(0.9, every=2), SIZES[:3])
    stepper: Any = rig.stepper
    before = averages_of(rig)
    assert isinstance(stepper, AveragingStepper)
    inner, stepper.inner = stepper.inner, Skipping(stepper.inner)
    step(rig, next(batches(PROBLEMS["transformer"].spec, [8])))
    assert stepper.num_applied == 3
    assert relative_error(averages_of(rig), before) == 0
    stepper.inner = inner
    step(rig, next(batches(PROBLEMS["transformer"].spec, [8])))
    assert relative_error(averages_of(rig), before) > 0


def of_rank(shardings: list[dict[str, Any]]) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    rigs = [trained("transformer", Averages(0.9), optimizer="sgd", **each) for each in shardings]
    return [(averages_of(rig), parameters_of(rig.model)) for rig in rigs]


def test_before_the_first_average_a_line_says_whose_weights_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    rig = trained("transformer", Averages(0.9, every=100), SIZES[:3])
    assert rig.averaged is not None
    before = [weight.detach().clone() for weight in rig.updated]
    with rig.averaged():
        assert all(torch.equal(one, other) for one, other in zip(before, rig.updated, strict=True))
    assert "ema: after 3 updates there is no average yet (ema.every=100)" in capsys.readouterr().out


def test_each_rank_averages_its_shards() -> None:
    (wanted,) = of_rank([{}])
    for ours in on_ranks(of_rank, [{"sharding": each} for each in ("ddp", "zero1", "fsdp", "tensor")]):
        for found in ours:
            for one, other in zip(found, wanted, strict=True):
                assert relative_error(one, other) < 1e-5


def resumed_on_ranks(sharding: str, state: dict[str, Any] | None) -> Any:
    """With a state: the weights and averages after going on from it; else the state of a shorter run."""
    rig = trained(
        "transformer", Averages(0.9, every=2), SIZES[:3] if state is None else [], sharding=sharding, optimizer="sgd"
    )
    if state is None:
        return gathered({"model": rig.model.state_dict(), "stepper": rig.stepper.state_dict()})
    state = deepcopy(state)  # ranks are given the same memory, and optimizers keep what they load
    load_whole(rig.model, state["model"])
    rig.stepper.load_state_dict(state["stepper"])
    for part in list(map(my_slice, batches(PROBLEMS["transformer"].spec, SIZES)))[3:]:
        step(rig, part)
    return averages_of(rig), parameters_of(rig.model)


def test_a_resumed_run_goes_on_to_the_bit_with_any_number_of_ranks() -> None:
    whole_run = trained("transformer", Averages(0.9, every=2), optimizer="sgd")
    wanted = averages_of(whole_run), parameters_of(whole_run.model)
    state = resumed_on_ranks("none", None)
    for one, other in zip(resumed_on_ranks("none", state), wanted, strict=True):
        assert relative_error(one, other) == 0
    for found in on_ranks(resumed_on_ranks, "fsdp", state):
        for one, other in zip(found, wanted, strict=True):
            assert relative_error(one, other) < 1e-4
    (saved, _) = on_ranks(resumed_on_ranks, "fsdp", None)
    for one, other in zip(resumed_on_ranks("none", saved), wanted, strict=True):
        assert relative_error(one, other) < 1e-4


@pytest.mark.parametrize("stepping", ["after_backward", "in_backward", "cpu_offload"])
def test_a_run_may_go_on_without_averages_or_begin_to_have_some(stepping: str) -> None:
    task = PROBLEMS["transformer"]
    having, lacking = (
        assemble(task, knobs_of(stepping=stepping, ema=each), CPU) for each in (Averages(0.9), NoAverages())
    )
    for part in batches(task.spec, [8, 8]):
        step(having, part)
    for rig in (lacking, assemble(task, knobs_of(stepping=stepping, ema=Averages(0.9)), CPU)):
        load_whole(rig.model, having.model.state_dict())
        rig.stepper.load_state_dict(deepcopy((having if rig is lacking else lacking).stepper.state_dict()))
        before = parameters_of(rig.model)
        assert rig is lacking or relative_error(averages_of(rig), before) == 0
        step(rig, next(batches(task.spec, [8])))
        after = parameters_of(rig.model)
        assert relative_error(after, before) > 0
        assert rig is lacking or relative_error(averages_of(rig), after) == 0  # the first average is a copy


@pytest.mark.parametrize("precision", ["fp32", "bf16_pure"])
def test_a_plan_and_a_ledger_count_averages_as_optimizer_state(precision: str) -> None:
    problem = PROBLEMS["transformer"]
    knobs = [knobs_of(precision=precision, **each) for each in ({}, {"ema": Averages()})]
    (plain, ours), planned = (
        (peak_as_measured(problem, each, 8) for each in knobs),
        peak_as_planned(problem, knobs[1], 8),
    )
    rig = assemble(problem, knobs[0], CPU)
    least = sum(4 * weight.numel() for weight in rig.model.parameters())
    more = ours.by_kind[Kind.OPTIMIZER] - plain.by_kind[Kind.OPTIMIZER]
    assert least <= more <= least + 512 * len([*rig.model.parameters()])
    assert planned.by_kind[Kind.OPTIMIZER] == ours.by_kind[Kind.OPTIMIZER]
    assert planned.peak_bytes == pytest.approx(ours.peak_bytes, rel=0.01)
    on_host = knobs_of(offload="parameters", ema=Averages())
    assert peak_as_measured(problem, on_host, 8).by_kind[Kind.OPTIMIZER] == 0


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"decay": 1.0}, r"ema\.decay=1\.0: must be at least 0 and below 1"),
        ({"decay": float("nan")}, r"ema\.decay=nan"),
        ({"decay": -0.1}, r"ema\.decay=-0\.1"),
        ({"every": 0}, r"ema\.every=0: must be at least 1 update"),
    ],
)
def test_values_out_of_range_are_named(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        Averages(**values)


def test_what_keeps_weights_elsewhere_is_refused() -> None:
    with pytest.raises(Incompatible, match="no other option moves weights to the host"):
        assemble(PROBLEMS["transformer"], knobs_of(ema=Averages(), weights="stream"), CPU)
