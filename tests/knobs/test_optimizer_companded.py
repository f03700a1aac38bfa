"""adamw_companded, sgd_companded and muon_companded: updates of torch's, whose states take a byte for each number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowvram.config.errors import BadInput
from lowvram.core.assemble import assemble
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob
from lowvram.core.ledger import ledger
from lowvram.core.rounding import Split, Stochastic
from lowvram.core.shards import total_norm
from lowvram.core.step import step
from lowvram.knobs.optimizer import (
    SGD,
    AdamW,
    AdamWCompanded,
    Moments,
    Muon,
    MuonCompanded,
    SGDCompanded,
    companded,
    plain,
)
from lowvram.knobs.optimizer.companding import BLOCK_NUMEL
from lowvram.knobs.optimizer.fp32_compute import RoundingPolicy
from lowvram.knobs.optimizer.state_formats import SCALES, Piece
from lowvram.knobs.precision import Bf16Split
from lowvram.loops.snapshot import has_form
from lowvram.tasks import Auto
from tests.laboratory import COMPILING_DEVICES, CPU, IMAGES, RESNET, TOKENS, TRANSFORMER, batches, knobs_of, make_batch

WIDE = {
    "transformer": Auto().pose(replace(TRANSFORMER, num_layers=2, width=64), TOKENS),
    "resnet": Auto().pose(replace(RESNET, width=16), IMAGES),
}
OPTIONS = {"adamw_companded": "adamw", "sgd_companded": "sgd", "muon_companded": "muon"}
BANDS = {"adamw_companded": 0.25, "sgd_companded": 0.03, "muon_companded": 0.7}  # Muon scales up errors, too
EACH = pytest.mark.parametrize("option", OPTIONS)
NUM_STEPS = 12


def weights_after(option: str, problem: str) -> dict[str, Tensor]:
    task = WIDE[problem]
    rig = assemble(task, knobs_of(optimizer=option), CPU)
    rig.stepper.set_lr(0.01)
    for batch in batches(task.spec, [8] * NUM_STEPS):
        assert step(rig, batch)[1].applied
    return {name: weight.detach() for name, weight in rig.model.named_parameters()}


@pytest.mark.sampled(2)
@EACH
@pytest.mark.parametrize("problem", WIDE)
def test_weights_go_nearly_where_those_of_fp32_states_go(option: str, problem: str) -> None:
    """Beside the way that they go."""
    start = dict(assemble(WIDE[problem], knobs_of(), CPU).model.named_parameters())
    found, wanted = (weights_after(name, problem) for name in (option, OPTIONS[option]))
    way, apart = (
        total_norm([one[name] - other[name].detach() for name in wanted])
        for one, other in ((wanted, start), (found, wanted))
    )
    assert 0 < float(apart) < BANDS[option] * float(way)


@pytest.mark.parametrize("device", COMPILING_DEVICES, ids=str)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (AdamWCompanded(0.01, 0.8, 0.9, 1e-6, 0.2), AdamW(0.01, 0.8, 0.9, 1e-6, 0.2)),
        (SGDCompanded(0.1, 0.9, True, 0.01), SGD(0.1, 0.9, True, 0.01)),
    ],
    ids=["adamw", "sgd"],
)
def test_every_field_reaches_torchs_optimizer(ours: Any, theirs: Any, device: torch.device) -> None:
    """Blocks of equal values, which codes hold to the last bit."""
    results = []
    for knob in (ours, theirs):
        weight = nn.Parameter(torch.linspace(-1, 1, 4, device=device).view(4, 1).repeat(1, BLOCK_NUMEL))
        optimizer = knob.make([weight])
        for number in range(3):
            weight.grad = torch.full_like(weight, 0.5 + number)
            optimizer.step()
        results.append(weight.detach())
    torch.testing.assert_close(*results)


def test_muon_knows_its_matrices() -> None:
    rig = assemble(WIDE["transformer"], knobs_of(optimizer="muon_companded"), CPU)
    step(rig, make_batch(WIDE["transformer"].spec, 4))
    states = rig.stepper.optimizer.state  # pyright: ignore[reportAttributeAccessIssue]
    names = {name: set(states[weight]) for name, weight in rig.model.named_parameters()}
    assert names["blocks.0.mlp.up.weight"] == {"momentum_buffer", "momentum_buffer" + SCALES}
    moments = {"exp_avg", "exp_avg_sq"}
    assert names["blocks.0.mlp.up.bias"] == {"step", *moments, *(name + SCALES for name in moments)}


@pytest.mark.parametrize(("knob", "num_states"), [(AdamWCompanded(), 2), (SGDCompanded(), 1)], ids=["adamw", "sgd"])
def test_little_is_wide_at_a_time(
    knob: AdamWCompanded | SGDCompanded, num_states: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the states themselves: copies of one piece in fp32."""
    for module in (companded, plain):
        monkeypatch.setattr(module, "PIECE_ELEMENTS", 2**10)
    weight = nn.Parameter(torch.ones(2**10, 2**6, dtype=torch.bfloat16))
    optimizer = knob.make([weight], RoundingPolicy(Split(8)))
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with ledger(optimizer=optimizer, inputs=[weight, weight.grad]) as peak:
        optimizer.step()
    each = weight.numel() * (1 + 4 / BLOCK_NUMEL)
    assert peak.by_kind_max[Kind.OPTIMIZER] == pytest.approx(num_states * each + weight.numel(), abs=2 * 512)
    assert 0 < peak.by_kind_max[Kind.OTHER] <= 10 * 4 * 2**10


def test_a_second_moment_goes_on_falling() -> None:
    """With beta2=0.999 it moves by a thousandth a step, a fifth of what codes can tell apart at most."""
    weight = nn.Parameter(torch.ones(64, BLOCK_NUMEL))
    optimizer = AdamWCompanded(beta1=0.0, beta2=0.999).make([weight])
    first = torch.ones_like(weight)
    first[:, ::2] = 0.1
    for gradient in [first, *[torch.zeros_like(weight)] * 300]:
        weight.grad = gradient
        optimizer.step()
    state = optimizer.state[weight]
    found = companded.FORMATS["exp_avg_sq"].read(state, "exp_avg_sq", Piece(None, slice(0, weight.numel())), weight)
    assert float(found[:, 1::2].mean()) == pytest.approx(1e-3 * 0.999**300, rel=5e-3)
    assert float(found[:, ::2].mean()) == pytest.approx(1e-5 * 0.999**300, rel=3e-2)


@pytest.mark.parametrize("rounding", [Stochastic(), Split(8), None], ids=lambda rounding: type(rounding).__name__)
def test_weights_of_any_format_are_updated(rounding: Stochastic | Split | None) -> None:
    weight = nn.Parameter(torch.ones(32, 32, dtype=torch.float32 if rounding is None else torch.bfloat16))
    optimizer = AdamWCompanded(lr=1e-3, weight_decay=0.0).make([weight], RoundingPolicy(rounding))
    for _ in range(20):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert float(1 - weight.detach().float().mean()) == pytest.approx(0.02, abs=2e-3)


@pytest.mark.parametrize(
    ("knob", "reference"),
    [
        (AdamWCompanded(0.3, 0.5, 0.6, 1e-3, 0.4), AdamW(0.3, 0.5, 0.6, 1e-3, 0.4)),
        (SGDCompanded(0.3, 0.5, True, 0.1), SGD(0.3, 0.5, True, 0.1)),
        (MuonCompanded(0.3, momentum=0.5), Muon(0.3, momentum=0.5)),
    ],
    ids=OPTIONS,
)
def test_the_reference_has_states_in_fp32(knob: Any, reference: Any) -> None:
    assert knob.reference() == reference
    assert type(knob.reference()) is type(reference)


def test_a_momentum_of_zero_is_refused() -> None:
    with pytest.raises(BadInput, match=r"optimizer\.momentum=0\.0: must be above 0: without it use optimizer=sgd"):
        SGDCompanded(momentum=0.0)


SPLIT: dict[str, str | Knob] = {"precision": "bf16_split"}
OTHER_FORMATS: list[dict[str, str | Knob]] = [
    SPLIT | {"optimizer": "adamw_companded"},
    {"precision": Bf16Split(16)},
    {"precision": "bf16_pure"},
    SPLIT | {"optimizer": AdamW(moments=Moments.bf16)},
    SPLIT | {"stepping": "in_backward", "optimizer": "adamw_companded"},
]


@pytest.mark.parametrize("choices", OTHER_FORMATS, ids=range(len(OTHER_FORMATS)))
def test_a_state_in_another_format_does_not_fit(choices: dict[str, str | Knob]) -> None:
    """Codes would be taken for what they stand for."""
    task, saved = WIDE["transformer"], []
    for each in (SPLIT, SPLIT, choices):
        rig = assemble(task, knobs_of(**({"optimizer": "adamw"} | each)), CPU)
        saved.append(rig.stepper.state_dict())
        step(rig, make_batch(task.spec, 4))
        saved.append(rig.stepper.state_dict())
    assert has_form(saved[1], saved[2])
    assert not has_form(saved[1], saved[4])
