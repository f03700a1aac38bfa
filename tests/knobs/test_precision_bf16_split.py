"""precision=bf16_split: as exact as weights of 24 or 32 bits, in 3 or 4 bytes each."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowvram.compat.torch_trees import tree_map_only
from lowvram.config.errors import BadInput, Incompatible
from lowvram.core.assemble import assemble
from lowvram.core.knob import Knob
from lowvram.core.ledger import ledger
from lowvram.core.mesh import data_ranks
from lowvram.core.rig import Rig
from lowvram.core.rounding import CORRECTION, Split
from lowvram.core.shards import whole
from lowvram.core.states import load_whole
from lowvram.core.step import step
from lowvram.knobs.accum import Parts
from lowvram.knobs.optimizer import SGD, Adafactor, AdamW
from lowvram.knobs.optimizer.fp32_compute import RoundingPolicy
from lowvram.knobs.precision import Bf16Split
from tests.knobs.test_precision_bf16_pure import BAND, curve
from tests.laboratory import CPU, DEVICES, PROBLEMS, batches, knobs_of, make_batch, peak_as_planned
from tests.ranks import on_ranks
from tests.tiers import first_of

NUM_STEPS = 20


def exact_weights(rig: Rig) -> dict[str, Tensor]:
    """The model's weights with their corrections, in fp32."""
    rounding, states = rig.rounding, states_of(rig)
    assert isinstance(rounding, Split)
    found = {}
    for name, weight in rig.model.named_parameters():
        found[name] = weight.detach().float()
        rounding.restore(found[name], states[weight][CORRECTION])
    return found


def states_of(rig: Rig) -> Mapping[Any, dict[str, Any]]:
    return rig.stepper.optimizer.state  # pyright: ignore[reportAttributeAccessIssue]


def updated(weights: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The weights after updates with the same gradients, which bf16 holds."""
    for seed in range(NUM_STEPS):
        draw = torch.Generator().manual_seed(seed)
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=draw).bfloat16().to(weight.device, weight.dtype)
        optimizer.step()
    return weights


def make_weights(dtype: torch.dtype, device: torch.device) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(7)
    values = [torch.randn(shape, generator=draw).bfloat16() for shape in ((40, 24), (24,), (), (8, 3, 3, 3))]
    return [nn.Parameter(value.to(device, dtype)) for value in values]


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("knob", [AdamW(), SGD(), Adafactor()], ids=lambda knob: type(knob).__name__)
def test_with_16_bits_updates_are_those_of_fp32_to_the_bit(knob: AdamW | SGD | Adafactor, device: torch.device) -> None:
    narrow, wide = (make_weights(dtype, device) for dtype in (torch.bfloat16, torch.float32))
    rounding = Split(16)
    optimizer = knob.make(narrow, RoundingPolicy(rounding))
    updated(narrow, optimizer)
    updated(wide, knob.make(wide))
    for weight, wanted in zip(narrow, wide, strict=True):
        exact = weight.detach().float()
        rounding.restore(exact, optimizer.state[weight][CORRECTION])
        assert torch.equal(exact, wanted.detach())


def test_with_8_bits_each_update_is_off_by_at_most_half_of_the_last_of_24_bits() -> None:
    """SGD without momentum, whose steps depend on nothing but gradients: errors add up."""
    narrow, wide = (make_weights(dtype, CPU) for dtype in (torch.bfloat16, torch.float32))
    knob, rounding = SGD(lr=1e-3, momentum=0.0), Split(8)
    optimizer = knob.make(narrow, RoundingPolicy(rounding))
    updated(narrow, optimizer)
    updated(wide, knob.make(wide))
    errors = []
    for weight, wanted in zip(narrow, wide, strict=True):
        exact = weight.detach().float()
        rounding.restore(exact, optimizer.state[weight][CORRECTION])
        bound = NUM_STEPS * 2.0**-16 * (wanted.detach().abs() + 0.1)  # 0.1: farther than a weight moves
        errors.append((exact - wanted.detach()).abs() / bound)
    worst = torch.cat([error.flatten() for error in errors]).max()
    assert 0 < float(worst) <= 1


def master_loop(problem: str, num_steps: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and weights of a hand-written loop with fp32 weights, of which the model gets a copy in bf16."""
    task = PROBLEMS[problem]
    rig = assemble(task, knobs_of(precision="bf16_split"), CPU)  # for its model in bf16
    masters = {name: nn.Parameter(weight.detach().float()) for name, weight in rig.model.named_parameters()}
    optimizer = AdamW().make(list(masters.values()))
    losses = []
    for batch in batches(task.spec, [4] * num_steps):
        loss = rig.criterion(rig.forward(batch), batch) / batch.num_targets
        loss.backward()
        for name, weight in rig.model.named_parameters():
            assert weight.grad is not None
            masters[name].grad, weight.grad = weight.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for name, weight in rig.model.named_parameters():
                weight.copy_(masters[name])
        losses.append(loss.detach())
    return losses, {name: master.detach() for name, master in masters.items()}


@pytest.mark.parametrize("problem", ["transformer", "resnet"])
def test_a_model_trains_as_with_a_copy_of_its_weights_in_fp32(problem: str) -> None:
    """To the bit, with 16 bits: the same losses and the same weights."""
    losses, weights = master_loop(problem, 6)
    rig = assemble(PROBLEMS[problem], knobs_of(precision=Bf16Split(16)), CPU)
    found = [step(rig, batch)[0] for batch in batches(PROBLEMS[problem].spec, [4] * 6)]
    assert torch.equal(torch.stack(found), torch.stack(losses))
    torch.testing.assert_close(exact_weights(rig), weights, rtol=0, atol=0)


@pytest.mark.parametrize("bits", [8, 16])
def test_a_weight_moves_by_steps_that_bf16_would_lose(bits: int) -> None:
    """100 steps of 1e-4, where numbers of bf16 lie 4e-3 apart; without noise."""
    weight = nn.Parameter(torch.ones(10, dtype=torch.bfloat16))
    optimizer = AdamW(lr=1e-4, weight_decay=0.0).make([weight], RoundingPolicy(Split(bits)))
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert weight.unique().tolist() == [pytest.approx(0.99, abs=2.0**-9)]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_companded", "sgd_companded", "muon_companded"])
def test_it_learns_as_fp32_does(optimizer: str) -> None:
    wanted = curve("fp32", optimizer.removesuffix("_companded"))
    assert wanted[-1] < 0.8 * wanted[0]
    assert float(((curve("bf16_split", optimizer) - wanted) / wanted).abs().max()) < BAND


# Bytes


BYTES: list[tuple[dict[str, str | Knob], float]] = [  # a parameter's weight, gradient and states
    ({"optimizer": "adamw"}, 2 + 2 + 1 + 8),
    ({"precision": Bf16Split(16), "optimizer": "adamw"}, 2 + 2 + 2 + 8),
    ({"optimizer": "adamw_companded"}, 2 + 2 + 1 + 2 * (1 + 4 / 64)),
    ({"optimizer": "adamw_companded", "stepping": "in_backward"}, 2 + 1 + 2 * (1 + 4 / 64)),
    ({"optimizer": "sgd_companded", "stepping": "in_backward"}, 2 + 1 + (1 + 4 / 64)),
]


@pytest.mark.parametrize(("choices", "num_bytes"), BYTES, ids=str)
def test_bytes_of_a_parameter(choices: dict[str, str | Knob], num_bytes: float) -> None:
    """Counted in the tensors that outlive an update, and the gradients before it: not in rounded-up allocations."""
    task = PROBLEMS["transformer"]
    rig = assemble(task, knobs_of(**({"precision": "bf16_split"} | choices)), CPU)
    step(rig, make_batch(task.spec, 4))
    numel = sum(weight.numel() for weight in rig.trainable)
    optimizers = getattr(rig.stepper, "optimizers", None)
    states = [optimizer.state for optimizer in dict.fromkeys(optimizers.values())] if optimizers else [states_of(rig)]
    kept = [value for state in states for each in state.values() for name, value in each.items() if name != "step"]
    found = sum(tensor.nbytes for tensor in [*kept, *rig.trainable])
    gradients = 0 if optimizers else 2 * numel
    slack = 4 * len(kept)  # a last block that isn't full has a scale, too
    assert num_bytes * numel <= found + gradients <= num_bytes * numel + slack


@pytest.mark.parametrize(
    ("problem", "stepping"),
    first_of(
        [(model, stepping) for model in ("transformer", "resnet") for stepping in ("in_backward", "after_backward")]
    ),
)
@pytest.mark.slow
def test_a_plan_is_what_is_measured(problem: str, stepping: str) -> None:
    task = PROBLEMS[problem]
    for optimizer in ("adamw", "adamw_companded", "sgd_companded", "muon_companded"):
        knobs = knobs_of(precision="bf16_split", optimizer=optimizer, stepping=stepping)
        rig, batch = assemble(task, knobs, CPU), make_batch(task.spec, 4)
        step(rig, batch)
        with ledger(rig.model, rig.stepper, batch.tensors()) as peak:
            step(rig, batch)
        assert peak_as_planned(task, knobs, 4).by_kind_max == peak.by_kind_max


# Together with others


def trained(stepping: str, **choices: str | Knob) -> tuple[list[Tensor], dict[str, Tensor]]:
    task = PROBLEMS["transformer"]
    rig = assemble(task, knobs_of(precision="bf16_split", stepping=stepping, **choices), CPU)
    losses = [
        step(rig, Parts(data_ranks().size).split(batch)[data_ranks().rank])[0] for batch in batches(task.spec, [8] * 4)
    ]
    return losses, {name: whole(weight) for name, weight in rig.model.named_parameters()}


def test_each_parameter_by_itself_is_all_together_to_the_bit() -> None:
    (losses, weights), (others, theirs) = trained("after_backward"), trained("in_backward")
    assert torch.equal(torch.stack(losses), torch.stack(others))
    torch.testing.assert_close(weights, theirs, rtol=0, atol=0)


def test_masters_on_the_host_need_no_correction() -> None:
    rig = assemble(PROBLEMS["transformer"], knobs_of(precision="bf16_split", stepping="cpu_offload"), CPU)
    step(rig, make_batch(PROBLEMS["transformer"].spec, 4))
    states = [state for each in rig.stepper.state_dict()["optimizers"] for state in each["state"].values()]
    assert states
    assert not any(CORRECTION in state for state in states)


def test_a_weight_that_rests_keeps_its_correction() -> None:
    """It is part of the weight. The rest of its state is dropped."""
    rig = assemble(PROBLEMS["transformer"], knobs_of(precision="bf16_split"), CPU)
    step(rig, make_batch(PROBLEMS["transformer"].spec, 4))
    weight = rig.trainable[0]
    before = states_of(rig)[weight][CORRECTION]
    rig.stepper.forget([weight])
    assert set(states_of(rig)[weight]) == {CORRECTION}
    assert states_of(rig)[weight][CORRECTION] is before
    step(rig, make_batch(PROBLEMS["transformer"].spec, 4))
    assert set(states_of(rig)[weight]) == {CORRECTION, "step", "exp_avg", "exp_avg_sq"}
    assert float(states_of(rig)[weight]["step"]) == 1


def resumed_on_ranks(precision: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights after four steps on this rank's shards; and after two, a snapshot and two more."""
    task = PROBLEMS["transformer"]
    first, second = (assemble(task, knobs_of(precision=precision, sharding="fsdp"), CPU) for _ in range(2))
    halves = [Parts(data_ranks().size).split(batch)[data_ranks().rank] for batch in batches(task.spec, [8] * 4)]
    for half in halves[:2]:
        step(first, half)
    saved = [gathered_everywhere(state) for state in (first.model.state_dict(), first.stepper.state_dict())]
    load_whole(second.model, saved[0])
    second.stepper.load_state_dict(saved[1])
    for rig in (first, second):
        for half in halves[2:]:
            step(rig, half)
    found, wanted = ({name: whole(weight) for name, weight in rig.model.named_parameters()} for rig in (second, first))
    return found, wanted


def gathered_everywhere(state: dict[str, Any]) -> dict[str, Any]:
    return tree_map_only(DTensor, whole, deepcopy(state))


@pytest.mark.parametrize("precision", first_of(["bf16_split", "bf16_pure"]))
@pytest.mark.slow
def test_shards_are_saved_and_loaded(precision: str) -> None:
    for found, wanted in on_ranks(resumed_on_ranks, precision):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def losses_on_ranks() -> list[Tensor]:
    return trained("after_backward", sharding="fsdp")[0]


@pytest.mark.slow
def test_shards_train_as_whole_weights_do() -> None:
    wanted, _ = trained("after_backward")
    for losses in on_ranks(losses_on_ranks):
        torch.testing.assert_close(losses, wanted, rtol=1e-2, atol=0)


# Refusals


@pytest.mark.parametrize("bits", [0, 4, 24])
def test_other_numbers_of_bits_are_refused(bits: int) -> None:
    with pytest.raises(BadInput, match=rf"precision\.correction_bits={bits}: must be 8 or 16"):
        Bf16Split(bits)


def test_without_unsplit_weights() -> None:
    """An optimizer that writes weights itself loses what their corrections would keep."""
    moved = []
    for policy in (RoundingPolicy(), RoundingPolicy(Split(8))):
        weight = nn.Parameter(torch.ones(10, dtype=torch.bfloat16))
        optimizer = AdamW(lr=1e-4, weight_decay=0.0).make([weight], policy)
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        moved.append(float(1 - weight.detach().float().mean()))
    assert moved == [0.0, pytest.approx(0.01, abs=2.0**-9)]


def test_an_optimizer_that_writes_weights_itself_is_refused() -> None:
    with pytest.raises(Incompatible, match="optimizer=adamw_8bit needs that a weight that trains is one number"):
        assemble(PROBLEMS["transformer"], knobs_of(precision="bf16_split", optimizer="adamw_8bit"), CPU)
