"""precision=fp8: which layers multiply in it, and how near they stay. On the CPU its numbers are emulated."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lowvram.config.errors import Incompatible
from lowvram.core.assemble import assemble, skeleton
from lowvram.core.rig import Rig
from lowvram.core.step import step
from lowvram.knobs.precision.fp8 import Fp8, convert
from lowvram.tasks import Auto
from tests.laboratory import CPU, PROBLEMS, TOKENS, TRANSFORMER, knobs_of, make_batch, needs_gpu, relative_error

WIDE = Auto().pose(replace(TRANSFORMER, width=32), TOKENS)


def gradients(rig: Rig) -> dict[str, Tensor]:
    batch = make_batch(WIDE.spec, 27).to(rig.device)  # the count of tokens divides by nothing
    (rig.criterion(rig.forward(batch), batch) / batch.num_targets).backward()
    return {name: parameter.grad for name, parameter in rig.model.named_parameters() if parameter.grad is not None}


def test_linear_layers_are_exchanged_but_for_the_head_and_odd_ones() -> None:
    rig = assemble(WIDE, knobs_of(), CPU)
    before = dict(rig.model.named_parameters())
    rig.model.odd = nn.Linear(32, 10)
    convert(rig.model, rig.structure.last_weights)
    changed = {name for name, module in rig.model.named_modules() if type(module).__name__ == "Float8Linear"}
    layers = ("attention.qkv", "attention.merge", "mlp.up", "mlp.down")
    assert changed == {f"blocks.{block}.{layer}" for block in range(3) for layer in layers}
    after = dict(rig.model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())


def test_layers_keep_their_hooks_and_those_of_other_classes_their_forward() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    model = nn.Sequential(nn.Linear(32, 32), Doubled(32, 32), nn.Linear(32, 32), nn.Linear(32, 16))
    model[0].register_forward_hook(lambda layer, given, output: output.tanh())
    model[2].forward = lambda input: nn.functional.linear(input, model[2].get_parameter("weight")) * 3
    layers, x = [*model], torch.randn(8, 32)
    wanted = model(x)
    convert(model, [model[3].get_parameter("weight")], emulate=True)
    assert [*model] == layers
    assert [type(layer).__name__ for layer in model] == ["Float8Linear", "Doubled", "Linear", "Linear"]
    assert torch.allclose(model(x), wanted, rtol=0.1, atol=0.1)


def test_a_plan_can_build_the_model_without_memory() -> None:
    model = skeleton(WIDE, knobs_of(precision="fp8"))
    assert sum(type(module).__name__ == "Float8Linear" for module in model.modules()) == 12


def test_emulated_gradients_are_in_the_band() -> None:
    wanted = gradients(assemble(WIDE, knobs_of(), CPU))
    rig = assemble(WIDE, knobs_of(), CPU)
    convert(rig.model, rig.structure.last_weights, emulate=True)
    assert 1e-2 < relative_error(gradients(rig), wanted) < Fp8.band


def test_a_cpu_refuses() -> None:
    """A device without it refuses before a weight has memory."""
    with pytest.raises(
        Incompatible, match=r"precision=fp8 needs that the device multiplies in fp8: .* use precision=bf16"
    ):
        assemble(WIDE, knobs_of(precision="fp8"), CPU)


def test_the_head_of_a_resnet_alone_stays_as_it_is() -> None:
    rig = assemble(PROBLEMS["resnet"], knobs_of(), CPU)
    convert(rig.model, rig.structure.last_weights)
    assert not [module for module in rig.model.modules() if type(module).__name__ == "Float8Linear"]


@pytest.mark.gpu
@needs_gpu[1]
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="no products in fp8"
)
def test_it_trains_on_a_card() -> None:
    cuda = torch.device("cuda")
    rig, plain = (assemble(WIDE, knobs_of(precision=which), cuda) for which in ("fp8", "fp32"))
    assert 1e-3 < relative_error(gradients(rig), gradients(plain)) < Fp8.band
    rig.model.zero_grad()
    losses = [float(step(rig, make_batch(WIDE.spec, 32).to(cuda))[0]) for _ in range(10)]
    assert losses[-1] < losses[0]
