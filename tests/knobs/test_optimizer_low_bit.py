"""optimizer=adamw_8bit and adamw_4bit: torchao's updates, and what surrounds them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lowvram.compat.torch_modes import is_traceable_wrapper_subclass
from lowvram.core.assemble import assemble
from lowvram.core.device import Card
from lowvram.core.kind import Kind
from lowvram.core.ledger import ledger
from lowvram.core.rounding import Stochastic
from lowvram.core.step import step
from lowvram.data.spec import DataSpec, Modality
from lowvram.knobs.optimizer import AdamW, AdamW4bit, AdamW8bit, low_bit
from lowvram.knobs.optimizer.fp32_compute import RoundingPolicy
from lowvram.knobs.optimizer.low_bit import compiled_step, contiguous
from lowvram.models.transformer import TransformerConfig
from lowvram.planning.memory.segments import rounded_up
from lowvram.planning.target import Target
from lowvram.planning.trace.events import Phase
from lowvram.planning.trace.fake import fake_tensors
from lowvram.planning.trace.tracer import trace
from lowvram.tasks import Auto
from tests.laboratory import CPU, DEVICES, IMAGES, RESNET, knobs_of, make_batch, needs_gpu, peak_as_planned

KNOBS = {"8bit": AdamW8bit(), "4bit": AdamW4bit()}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_bit, "compiled_step", compiled_step)


def updated(optimizer: torch.optim.Optimizer, weight: nn.Parameter, num_steps: int) -> Tensor:
    for seed in range(num_steps):
        drawn = 0.01 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
        weight.grad = torch.empty_like(weight).copy_(drawn).detach()
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_8_bits_stay_as_near_to_32_as_bitsandbytes_asks(device: torch.device) -> None:
    """Its own test: 50 steps, after each of which the fp32 optimizer's weight and moments are given to the other."""
    draw = torch.Generator().manual_seed(0)
    values = 0.1 * torch.randn(1024, 32, generator=draw).to(device)
    ours, theirs = (nn.Parameter(values.clone()) for _ in range(2))
    values_of_adam = (1e-3, 0.9, 0.999, 1e-8, 0.0)
    eight, plain = AdamW8bit(*values_of_adam).make([ours]), AdamW(*values_of_adam).make([theirs])
    for _ in range(50):
        ours.grad = 0.01 * torch.randn(1024, 32, generator=draw).to(device)
        theirs.grad = ours.grad.clone()
        eight.step()
        plain.step()
        with torch.no_grad():
            error = (ours - theirs).abs()
            assert 0 < error.mean() < 6e-5
            assert (error / (theirs.abs() + 1e-9)).mean() < 6e-4
            ours.copy_(theirs)
            for moment in ("exp_avg", "exp_avg_sq"):
                plain.state[theirs][moment].copy_(eight.state[ours][moment].dequantize())


@pytest.mark.slow
def test_compiled_updates_are_the_eager_ones_and_no_learning_rate_compiles_anew(compiled: None) -> None:
    """Neither does a ledger, which an update of torchao's would refuse: it is lifted around it."""
    weights = [nn.Parameter(torch.ones(64, 64)) for _ in range(2)]
    ours, eager = (KNOBS["8bit"].make([weight]) for weight in weights)
    updated(ours, weights[0], 2)
    num_graphs = counters["stats"]["unique_graphs"]
    assert num_graphs > 0
    for lr in (0.1, 0.2):
        ours.param_groups[0]["lr"] = lr
        updated(ours, weights[0], 1)
    assert counters["stats"]["unique_graphs"] == num_graphs
    ours.param_groups[0]["lr"] = 0.3
    with ledger():
        updated(ours, weights[0], 1)
    with torch.compiler.set_stance("force_eager"):
        updated(eager, weights[1], 2)
        for lr in (0.1, 0.2, 0.3):
            eager.param_groups[0]["lr"] = lr
            updated(eager, weights[1], 1)
    torch.testing.assert_close(*weights)


@pytest.mark.parametrize(("option", "most"), [("adamw_8bit", 0.27), ("adamw_4bit", 0.15)])
def test_states_of_gpt2_take_the_share_that_is_claimed(option: str, most: float) -> None:
    """Of AdamW's 8 bytes per parameter. Small tensors and scales included; on paper, so no memory is asked for."""
    gpt2 = Auto().pose(TransformerConfig(12, 768, 12, 1024), DataSpec(Modality.TOKENS, 50_257, (8,)))
    with fake_tensors():
        rig = assemble(gpt2, knobs_of(optimizer=option), CPU)
        optimizer = rig.make_optimizer(rig.trainable)
        for parameter in rig.trainable:
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
    leaves = [inner for state in optimizer.state.values() for value in state.values() for inner in parts_of(value)]
    num_parameters = sum(parameter.numel() for parameter in rig.trainable)
    assert num_parameters > 120e6
    assert 0.8 * most < sum(leaf.nbytes for leaf in leaves) / (8 * num_parameters) < most


@pytest.mark.parametrize("option", KNOBS)
def test_paper_and_ledger_agree_on_states(option: str) -> None:
    problem = Auto().pose(replace(RESNET, width=24), IMAGES)
    rig, batch = assemble(problem, knobs_of(optimizer=f"adamw_{option}"), CPU), make_batch(problem.spec, 4)
    step(rig, batch)
    with ledger(rig.model, rig.stepper, batch.tensors()) as real:
        step(rig, batch)
    fake_tensors = peak_as_planned(problem, knobs_of(optimizer=f"adamw_{option}"), 4)
    assert fake_tensors.by_kind_max[Kind.OPTIMIZER] == real.by_kind_max[Kind.OPTIMIZER]


@pytest.mark.parametrize("option", KNOBS)
def test_pieces_of_a_large_weight_are_updated_as_the_whole(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, counts of updates too. The last piece is a smaller one."""
    values = torch.randn(130, 128, generator=torch.Generator().manual_seed(0))
    whole, cut = (nn.Parameter(values.clone()) for _ in range(2))
    optimizers = [KNOBS[option].make([weight]) for weight in (whole, cut)]
    updated(optimizers[0], whole, 3)
    monkeypatch.setattr(low_bit, "PIECE_ELEMENTS", 4096)
    updated(optimizers[1], cut, 3)
    assert torch.equal(whole, cut)
    states = [optimizer.state[weight] for optimizer, weight in zip(optimizers, (whole, cut), strict=True)]
    assert states[0]["step"] == states[1]["step"] == 3
    for moment in ("exp_avg", "exp_avg_sq"):
        assert all(torch.equal(*pair) for pair in zip(*(parts_of(state[moment]) for state in states), strict=True))


SCRATCH_BYTES = {"8bit": [], "4bit": [num := 2 * 131_072 + 2 * 2**24 + 2 * 2**25, num, num // 8]}


def with_gradient(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    weight = nn.Parameter(torch.zeros(shape, device=device, dtype=dtype))
    weight.grad = torch.zeros_like(weight)
    return weight


@pytest.mark.parametrize("option", KNOBS)
def test_an_update_of_a_large_weight_takes_what_torchs_allocator_was_asked_for(option: str) -> None:
    """Recorded on an emulated card, for pieces of 4096 x 1024. A small weight takes nothing, nor does one without a
    gradient."""
    with fake_tensors():
        weights = [with_gradient(shape, CPU) for shape in ((8192 + 512, 1024), (40,), (4096, 1024))]
        weights[-1].grad = None
        optimizer = KNOBS[option].make(weights)
        optimizer.step()
        assert isinstance(optimizer, low_bit.LowBit)
        assert [sum(sizes) for sizes in optimizer.scratch_bytes()] == SCRATCH_BYTES[option]


NORMS_BYTES = 2048  # partial sums of the gradients' norms, which a card takes, too
BATCH_BYTES = 512  # which waits in the host's memory if there is a card


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("option", "each_bytes"), [("8bit", 0), ("4bit", 24)])
def test_a_plan_for_a_card_has_what_updates_take(option: str, each_bytes: int) -> None:
    problem = Auto().pose(TransformerConfig(1, 64, 2, 8), DataSpec(Modality.TOKENS, 20_000, (8,)))
    peaks = [
        trace(problem, knobs_of(optimizer=f"adamw_{option}"), 2, Target(card)).sums().by_phase[Phase.UPDATE]
        for card in (None, Card("H100", (9, 0)))
    ]
    most_bytes = each_bytes * 20_000 * 64
    assert most_bytes <= peaks[1] - peaks[0] + BATCH_BYTES <= 1.1 * most_bytes + NORMS_BYTES


@pytest.mark.parametrize("device", [pytest.param(torch.device("cuda"), marks=needs_gpu)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("option", KNOBS)
def test_a_cards_allocator_serves_what_an_update_says_it_takes(
    option: str, dtype: torch.dtype, device: torch.device, compiled: None
) -> None:
    """But for the seed of stochastic rounding, of a few bytes. The last piece is smaller."""
    weight = with_gradient((6000, 1024), device, dtype)
    optimizer = KNOBS[option].make([weight], RoundingPolicy(Stochastic() if dtype is torch.bfloat16 else None))
    optimizer.step()
    assert isinstance(optimizer, low_bit.LowBit)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    wanted = max((sum(rounded_up(size, 512) for size in sizes) for sizes in optimizer.scratch_bytes()), default=0)
    assert wanted <= torch.cuda.max_memory_allocated() - before <= wanted + 1024


@pytest.mark.parametrize("option", KNOBS)
def test_channels_last_is_updated_as_any_other_weight(option: str) -> None:
    """Blocks run along memory, so their scales may differ, but not what they mean."""
    values = torch.randn(32, 16, 3, 3, generator=torch.Generator().manual_seed(0))
    weights = [nn.Parameter(values.clone()), nn.Parameter(values.clone(memory_format=torch.channels_last))]
    for weight in weights:
        updated(KNOBS[option].make([weight]), weight, 3)
    plain = nn.Parameter(values.clone())
    updated(AdamW().make([plain]), plain, 3)
    moved = float((plain - values).detach().norm())
    for weight in weights:
        assert float((weight - plain).detach().norm()) < (0.5 if option == "4bit" else 0.05) * moved


@pytest.mark.parametrize("option", KNOBS)
def test_codes_mean_the_same_after_a_plan(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao remembers what they mean, for the whole process. A plan has no values that could be remembered."""
    theirs = import_module(f"torchao.optim.subclass_{option}")
    for name in ("get_qmap_signed", "get_qmap_unsigned"):
        monkeypatch.setattr(theirs, name, cache(getattr(theirs, name).__wrapped__))
    with fake_tensors():
        weight = nn.Parameter(torch.zeros(64, 128))
        updated(KNOBS[option].make([weight]), weight, 1)
    optimizer = KNOBS[option].make([nn.Parameter(torch.zeros(64, 128))])
    assert isinstance(optimizer, low_bit.LowBit)
    for moment in ("exp_avg", "exp_avg_sq"):
        levels = optimizer.new_state(nn.Parameter(torch.zeros(64, 128)))[moment].qmap  # pyright: ignore
        assert len(levels.unique()) == 2 ** int(option[0])
        assert levels.max() == 1


def test_a_view_of_a_parameter_shares_its_memory_and_gradient() -> None:
    weight = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    weight.grad = torch.randn(4, 3, 2, 2)
    view = contiguous(weight)
    assert view.is_contiguous()
    assert view.data_ptr() == weight.data_ptr()
    assert view.grad is not None
    assert torch.equal(view.grad.permute(0, 3, 1, 2), weight.grad)
    plain = nn.Parameter(torch.randn(4, 3))
    plain.grad = torch.randn(4, 3)
    assert contiguous(plain) is plain


@pytest.mark.parametrize("option", KNOBS)
def test_small_states_stay_fp32_under_bf16_weights(option: str) -> None:
    """Also when they are loaded: torch would give them the format of their parameter."""
    weights = [nn.Parameter(torch.ones(size, dtype=torch.bfloat16)) for size in (10, 8192)]
    optimizer, other = (KNOBS[option].make(weights, RoundingPolicy(Stochastic())) for _ in range(2))
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    other.load_state_dict(optimizer.state_dict())
    for which in (optimizer, other):
        assert which.state[weights[0]]["exp_avg"].dtype is torch.float32
        assert type(which.state[weights[1]]["exp_avg"]) is not Tensor
        num_bytes = sum(inner.nbytes for inner in parts_of(which.state[weights[1]]["exp_avg"]))
        assert num_bytes < 8192 + 2048


def parts_of(state: Any) -> list[Tensor]:
    """The tensors inside one of few bits, or the tensor itself."""
    if is_traceable_wrapper_subclass(state):
        return [getattr(state, name) for name in state.__tensor_flatten__()[0]]
    return [state]


@pytest.mark.parametrize("option", KNOBS)
def test_bf16_weights_are_rounded_stochastically(option: str) -> None:
    """Steps of a 1/2000 of a weight, which rounding to the nearest would lose."""
    knob = replace(KNOBS[option], lr=5e-4, weight_decay=0.0)
    for rounding, moves in ((Stochastic(), True), (None, False)):
        weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        optimizer = knob.make([weight], RoundingPolicy(rounding))
        for _ in range(20):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        mean = float(weight.detach().float().mean())
        assert mean == pytest.approx(1 - 20 * 5e-4, abs=5e-4) if moves else mean == 1.0
