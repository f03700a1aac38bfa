"""sparsity: masked weights are 0, whatever updates them, and so are their moments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowvram.compat.torch_autograd import version_of
from lowvram.compress.sparsity import Magnitude, RigL, Set, TwoOfFour
from lowvram.core import host
from lowvram.core.assemble import assemble
from lowvram.core.rounding import CORRECTION
from lowvram.core.step import step
from lowvram.knobs.logits.chunked import TiledLogits
from lowvram.knobs.optimizer import AdamW
from lowvram.knobs.optimizer.plain import Moments
from lowvram.knobs.precision import Fp16
from lowvram.knobs.stepping import AfterBackward, InBackward
from lowvram.knobs.stepping.in_backward import SumsIn
from lowvram.models.transformer import TransformerConfig
from lowvram.tasks import Auto
from tests.laboratory import CPU, PROBLEMS, TOKENS, knobs_of, make_batch
from tests.masks import (
    OFTEN,
    STEPS,
    Choices,
    gradients_of,
    masked_in,
    masks_of,
    num_masked,
    optimizers_of,
    rig_of,
    steps_of,
    total,
    trained,
)

pytestmark = pytest.mark.sampled(2)

UPDATES: dict[str, Choices] = {
    "sgd": {"optimizer": "sgd"},
    "moments in bf16": {"optimizer": AdamW(moments=Moments.bf16)},
    "muon": {"optimizer": "muon"},
    "whole matrices": {"optimizer": "galore"},
    "rows and columns": {"optimizer": "adafactor"},
    "corrections": {"precision": "bf16_split", "optimizer": "muon"},
    "in bf16": {"precision": "bf16_pure"},
    "in_backward": {"stepping": InBackward(clip=0.5)},
    "in parts": {"accum": "x2", "stepping": "in_backward"},
    "cpu_offload": {"stepping": "cpu_offload", "precision": "bf16_pure"},
    "fp16": {"precision": "fp16"},
    "recomputed": {"ckpt": "every1", "logits": "chunked"},
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("choices", UPDATES.values(), ids=UPDATES)
@pytest.mark.parametrize("option", ["magnitude", "rigl"])
def test_masked_weights_are_zero_after_each_update(option: str, choices: Choices) -> None:
    rig = rig_of("transformer", sparsity=OFTEN[option], **choices)
    for _ in steps_of(rig):
        for weight, masked in masked_in(rig).values():
            assert not weight[masked].any()
    assert num_masked(rig) == round(0.7 * total(rig))
    assert sum(int((weight == 0).sum()) for weight, _ in masked_in(rig).values()) < num_masked(rig) + total(rig) // 50


@pytest.mark.parametrize(("problem", "optimizer"), [("resnet", "sgd"), ("transformer", "muon")])
@pytest.mark.parametrize("option", OFTEN)
def test_moments_of_masked_weights_are_zero(option: str, problem: str, optimizer: str) -> None:
    rig = rig_of(problem, sparsity=OFTEN[option], optimizer=optimizer)
    for _ in steps_of(rig):
        for weight, masked in masked_in(rig).values():
            moments = [value for value in optimizers_of(rig)[weight].values() if value.shape == weight.shape]
            assert moments
            assert not any(moment[masked].any() for moment in moments)
            assert all(moment[~masked].any() for moment in moments)


def test_gradients_of_masked_weights_reach_no_moment_where_nothing_grows() -> None:
    rig = rig_of("transformer", sparsity=RigL(share=0.7, drop=1e-6, every=1, steps=100))
    before = masks_of(rig)
    for _ in steps_of(rig, 3):
        for weight, masked in masked_in(rig).values():
            assert not optimizers_of(rig)[weight]["exp_avg"][masked].any()
    assert torch.equal(masks_of(rig), before)


def test_corrections_of_masked_weights_are_zero() -> None:
    """Muon's updates are dense: without that a weight would begin to grow from what was left in its correction."""
    rig = rig_of("transformer", sparsity=OFTEN["rigl"], precision="bf16_split", optimizer="muon")
    for _ in steps_of(rig):
        for weight, masked in masked_in(rig).values():
            correction = optimizers_of(rig)[weight][CORRECTION]
            assert not correction[masked].any()
            assert correction[~masked].any()


@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.parametrize("optimizer", ["adamw_8bit", "adamw_companded"])
def test_moments_of_few_bits_are_zero(optimizer: str) -> None:
    problem = Auto().pose(TransformerConfig(num_layers=1, width=64, num_heads=2, context=8), TOKENS)
    rig = assemble(problem, knobs_of(sparsity=OFTEN["rigl"], optimizer=optimizer), CPU)
    for number in range(3):
        step(rig, make_batch(problem.spec, 8, number))
    for weight, masked in masked_in(rig).values():
        moment = optimizers_of(rig)[weight]["exp_avg"]
        values = moment.dequantize() if optimizer == "adamw_8bit" else moment
        assert not values[masked].any()
        assert values[~masked].any()


@pytest.mark.parametrize("parts", [{}, {"accum": "x2"}], ids=["whole", "in parts"])
@pytest.mark.parametrize("option", ["magnitude", "movement", "rigl"])
def test_all_steppers_keep_the_same_masks(option: str, parts: Choices) -> None:
    """Those that free each gradient at once, and those that sum them over parts elsewhere."""
    steppings: list[Choices] = [{}, {"stepping": "in_backward"}, {"stepping": "cpu_offload"}]
    rigs = (rig_of("transformer", sparsity=OFTEN[option], **parts, **choices) for choices in steppings)
    plain, *others = (trained(rig, 3) for rig in rigs)
    for other in others:
        assert (masks_of(other) != masks_of(plain)).double().mean() <= (0.01 if parts else 0)  # sums in another order


def test_masks_are_copied_to_host_memory_only_where_they_change() -> None:
    """Each such copy makes the host wait for the device."""
    rig = rig_of("transformer", sparsity=OFTEN["two_of_four"], stepping="cpu_offload", optimizer="sgd")
    stepper: Any = rig.stepper
    masters: Any = stepper.inner.masters
    masks = {masters[weight]: mask for weight, mask in stepper.masking.masks.items()}
    counts = []
    for _ in steps_of(rig):
        copies = [mask.beside(master) for master, mask in masks.items()]
        assert all(map(host.holds, copies))
        assert all(torch.equal(copied, mask.masked) for copied, mask in zip(copies, masks.values(), strict=True))
        counts.append({version_of(copied) for copied in copies})
    assert counts == [{1}] * 2 + [{2}] * (STEPS - 2)  # from the step on that sets the masks


def test_gradients_of_masked_weights_do_not_count_for_the_norm() -> None:
    clip = AfterBackward(clip=1e-3)
    knob = Set(share=0.9, steps=STEPS)
    rig = rig_of("transformer", sparsity=knob, stepping=clip)
    norm = step(rig, make_batch(PROBLEMS["transformer"].spec, 8))[1].grad_norm
    dense = rig_of("transformer", stepping=clip)
    dense.model.load_state_dict(rig_of("transformer", sparsity=knob).model.state_dict())
    batch = make_batch(PROBLEMS["transformer"].spec, 8)
    gradients = gradients_of(dense, batch)
    masks = {f"{name}.weight": masked for name, (_, masked) in masked_in(rig).items()}
    count = batch.num_targets
    wanted = sum(
        float(gradient.masked_fill(masks[name], 0).square().sum() if name in masks else gradient.square().sum())
        for name, gradient in gradients.items()
    )
    assert float(norm * count) == pytest.approx(wanted**0.5, rel=1e-4)


@pytest.mark.parametrize("sums", [SumsIn.bf16, SumsIn.int8])
def test_gradients_summed_a_few_rows_at_a_time_are_masked_too(sums: SumsIn) -> None:
    """Of the head, whose gradient logits=tiled would add to such sums before a mask sees it."""
    head: Choices = {"sparsity": TwoOfFour(begin=0.0, layers=["head"], steps=1), "accum": "x2"}
    rig = rig_of("transformer", **head, logits=TiledLogits(chunk_tokens=4), stepping=InBackward(sums=sums))
    trained(rig, 2)
    ((weight, masked),) = masked_in(rig).values()
    stepper: Any = rig.stepper
    moment = stepper.inner.optimizers[weight].state[weight]["exp_avg"]
    assert not moment[masked].any()
    assert moment[~masked].any()


def test_a_skipped_step_masks_nothing_halfway() -> None:
    """The step that would set the masks overflows: they take effect with the next update."""
    knob = Magnitude(share=0.5, steps=1)
    rig = rig_of("transformer", sparsity=knob, precision=Fp16(init_scale=2.0**31))
    assert not step(rig, make_batch(PROBLEMS["transformer"].spec, 8))[1].applied
    for _ in range(20):
        update = step(rig, make_batch(PROBLEMS["transformer"].spec, 8))[1]
        if update.applied:
            break
    assert all(not weight[masked].any() for weight, masked in masked_in(rig).values())
    for weight, masked in masked_in(rig).values():
        states: Any = rig.stepper
        assert not states.inner.inner.optimizer.state[weight]["exp_avg"][masked].any()
